"""Arguments other than tensors changed between calls, tensors written between calls, same ones."""

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, times=1, mode="sum", mask=None, options=None):
        for _ in range(times):
            x = self.layer(x)
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        if options:
            x = x * options.get("scale", 1) + len(options)
        return getattr(x, mode)(dim=0)


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Net().to(device).eval()
x = torch.randn(3, 6, device=device)
mask = torch.zeros(3, 6, dtype=torch.bool, device=device)
options = {"scale": 2}

results = {}
with torch.no_grad():
    for call in range(3):
        results[f"plain{call}"] = model(x).cpu()
        results[f"times{call}"] = model(x, times=call + 1).cpu()
        results[f"mode{call}"] = model(x, mode=["sum", "mean", "prod"][call]).cpu()
        results[f"mask{call}"] = model(x, mask=mask).cpu()
        results[f"options{call}"] = model(x, options=options).cpu()
        results[f"transposed{call}"] = model(x.expand(2, 3, 6)[call % 2].contiguous()).cpu()
        results[f"strided{call}"] = model(torch.cat([x, x], dim=1)[:, ::2]).cpu()
        results[f"same twice{call}"] = model(x, mask=x > 0).cpu()
        x.add_(1)
        x[0] = call
        mask[:, call] = True
        options[f"more{call}"] = True
        options["scale"] += 1
torch.save(results, path)
