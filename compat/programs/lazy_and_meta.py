"""Lazy layers, and a model made without memory, filled on the device, then loaded."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
source = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
model = model.to_empty(device=device).eval()
model.load_state_dict(source.state_dict())
lazy = nn.Sequential(nn.LazyLinear(7), nn.ReLU(), nn.LazyLinear(2)).to(device)

results = {}
with torch.no_grad():
    for call in range(3):
        x = torch.randn(4, 6, device=device)
        results[f"model{call}"] = model(x).cpu()
        results[f"lazy{call}"] = lazy(x).cpu()
        results[f"source{call}"] = source(x.cpu())
results["kinds"] = [type(layer).__name__ for layer in lazy]
torch.save(results, path)
