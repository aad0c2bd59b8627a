"""DataParallel over the devices there are (one), saved with its prefix and loaded without."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).to(device).eval()
model = nn.DataParallel(plain)

results = {"keys": sorted(model.state_dict())}
with torch.no_grad():
    for call in range(3):
        x = torch.randn(4, 6).to(device)
        results[f"parallel{call}"] = model(x).cpu()
        results[f"plain{call}"] = model.module(x).cpu()
other = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).to(device).eval()
other.load_state_dict({k.removeprefix("module."): v for k, v in model.state_dict().items()})
results["other"] = other(x).detach().cpu()
torch.save(results, path)
