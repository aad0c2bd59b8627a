"""Weights changed between calls, in every way there is: the next call must see it: WAY..."""

import sys

import torch
from torch import nn

path, ways = sys.argv[1], sys.argv[2:]
device = "cuda" if torch.cuda.is_available() else "cpu"


def in_place(call):
    with torch.no_grad():
        weight.add_(0.1 * call)
        weight[0] = call


def data_assigned(call):
    weight.data = torch.full((10, 6), 0.1 * call, device=device)


def data_in_place(call):
    weight.data.mul_(1.0 + call)


def data_view(call):
    weight.data.view(-1)[::3].fill_(call)


def detached(call):
    weight.detach().t()[1].copy_(torch.arange(10.0) * call)


def data_element(call):
    weight.data[1, 2] = call


def kept_view(call):
    view.fill_(call)


def loaded(call):
    model.load_state_dict({name: value * (1 + call) for name, value in model.state_dict().items()})


def optimised(_call):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def vector(call):
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat * (1 + call), model.parameters())


def replaced(call):
    model[0].weight = nn.Parameter(torch.full((10, 6), 0.2 * call, device=device))


def swapped(call):
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(weight.detach() * 0.5 + call))


def foreach(call):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.0 + 0.1 * call)


def out_argument(call):
    with torch.no_grad():
        torch.mul(torch.ones_like(weight), call, out=weight)


def initialised(call):
    torch.manual_seed(call)
    nn.init.xavier_uniform_(weight)


def applied(call):
    model.apply(lambda layer: hasattr(layer, "bias") and layer.bias.data.fill_(call))


def copied_back(call):
    weight.data.copy_(torch.from_numpy(weight.detach().cpu().numpy() * call))


results = {}
for way in ways:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).to(device).eval()
    weight = model[0].weight
    view = weight.data[2:4]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(4, 6).to(device)
    for call in range(4):
        with torch.no_grad():
            results[f"{way}, answer {call}"] = model(x).cpu()
            results[f"{way}, again {call}"] = model(x).cpu()
        globals()[way](call + 1)
        results[f"{way}, weight {call}"] = model[0].weight.detach().cpu().clone()
torch.save(results, path)
