"""Gives tensors of the CPU to what is on the GPU, where there is one: KIND."""

import sys

import torch
from torch import nn

path, kind = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x = torch.randn(3, 4)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device).eval()
results = {}
with torch.no_grad():
    if kind == "model":
        results["y"] = model(x)
    elif kind == "called_before":
        model(x.to(device))
        results["y"] = model(x)
    elif kind == "convolution":
        results["y"] = nn.Conv1d(3, 2, 2).to(device)(x)
    elif kind == "embedding":
        results["y"] = nn.Embedding(5, 2).to(device)(torch.tensor([1, 3]))
    elif kind == "sum":
        results["y"] = x.to(device) + x
    elif kind == "product":
        results["y"] = x.to(device) @ x.T
    elif kind == "joined":
        results["y"] = torch.cat([x.to(device), x])
    elif kind == "indexed":
        results["y"] = x[torch.tensor([0, 1]).to(device)]
    elif kind == "half_moved":
        model[0].cpu()
        results["y"] = nn.Sequential(model[0], nn.Linear(4, 2).to(device))(x)
torch.save(results, path)
