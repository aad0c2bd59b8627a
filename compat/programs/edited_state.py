"""A state dict edited and parameters replaced after the model was moved: heads, names, freezing."""

import sys
from collections import OrderedDict

import torch
from torch import nn

path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(OrderedDict(body=nn.Linear(8, 8), norm=nn.LayerNorm(8), head=nn.Linear(8, 4)))
model.to(device).eval()
x = torch.randn(3, 8).to(device)

results = {}
with torch.no_grad():
    results["first"] = model(x).cpu()
    state = model.state_dict()
    state["body.weight"].mul_(2)
    results["shared"] = model(x).cpu()
    state = OrderedDict((name, value.clone()) for name, value in state.items())
    state["head.weight"] = torch.zeros(4, 8)
    state["head.bias"] += 1
    results["missing"] = [str(key) for key in model.load_state_dict(state).missing_keys]
    results["loaded"] = model(x).cpu()
    del state["norm.weight"]
    state["module.extra"] = torch.ones(1)
    answer = model.load_state_dict(state, strict=False)
    results["loose"] = [list(answer.missing_keys), list(answer.unexpected_keys)]
    model.head = nn.Linear(8, 2).to(device)
    results["new head"] = model(x).cpu()
    model.body.weight = nn.Parameter(torch.eye(8, device=device))
    results["new weight"] = model(x).cpu()
    model.load_state_dict(
        {**model.state_dict(), "body.bias": torch.zeros(8, device=device)}, assign=True
    )
    results["assigned"] = model(x[:2]).cpu()
    nn.init.constant_(model.head.bias, 3)
    results["initialised"] = model(x).cpu()
torch.save(results, path)
