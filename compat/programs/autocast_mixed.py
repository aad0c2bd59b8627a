"""Autocast around, inside and off within a model."""

import sys

import torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x):
        with torch.autocast(self.kind, dtype=torch.bfloat16):
            h = self.first(x).relu()
        with torch.autocast(self.kind, enabled=False):
            return self.second(h.float()), h


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)).to(device).eval()
mixed = Mixed(device).to(device).eval()

results = {}
for call in range(3):
    x = torch.randn(4, 16).to(device)
    with torch.no_grad(), torch.autocast(device_type=device, dtype=torch.bfloat16):
        y = plain(x)
    with torch.no_grad():
        z, h = mixed(x)
        exact = plain(x)
    with torch.autocast(device_type=device, dtype=torch.float16, enabled=call != 1):
        w = plain(x)
    results[f"dtypes{call}"] = [str(t.dtype) for t in (y, z, h, exact, w)]
    results[f"autocast{call}"] = y.cpu()
    results[f"inside{call}"] = z.cpu()
    results[f"hidden{call}"] = h.cpu()
    results[f"exact{call}"] = exact.cpu()
    results[f"half{call}"] = w.detach().cpu()
torch.save(results, path)
