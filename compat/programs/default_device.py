"""Tensors and modules made on the device by the default device and by a context."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
results = {}
with torch.device(device):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    table = torch.arange(6)
results["inside"] = [table.device.type == device, model[0].weight.device.type == device]
torch.set_default_device(device)
for call in range(3):
    x = torch.rand(3, 4)
    grid = torch.stack(torch.meshgrid(torch.arange(3.0), torch.linspace(0, 1, 4), indexing="ij"))
    results[f"y{call}"] = (model(x) + grid.mean()).detach().cpu()
    results[f"made{call}"] = x.device.type == device
made = [torch.eye(2), torch.full((2,), 3.0), torch.tensor([1, 2]), torch.zeros_like(x)]
results["all"] = all(t.device.type == device for t in made)
results["sum"] = float(sum(t.sum() for t in made))
torch.set_default_device(None)
results["after"] = torch.zeros(1).device.type
torch.save(results, path)
