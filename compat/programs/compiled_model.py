"""torch.compile of a module, in place, of a function, or with CUDA graphs: WAY."""

import sys

import torch
from torch import nn

path, way = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(device).eval()
plain = model


@torch.no_grad()
def score(x):
    return model(x).softmax(-1)


if way == "module":
    model = torch.compile(model, backend="eager")
elif way == "method":
    model.compile(backend="eager")
elif way == "function":
    score = torch.compile(score, backend="eager")
else:
    model = torch.compile(model, mode="reduce-overhead")

results = {}
for call, batch in enumerate([2, 2, 5, 7]):
    x = torch.randn(batch, 16).to(device)
    results[f"scores{call}"] = score(x).cpu()
    if call == 2:
        with torch.no_grad():
            plain[0].weight.mul_(0.5)
torch.save(results, path)
