"""Monte Carlo dropout: training mode on purpose, the same seed gives the same masks."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 3), nn.AlphaDropout(0.1)
)
model = model.to(device).train()

results = {}
x = torch.randn(4, 10).to(device)
with torch.no_grad():
    for call in range(4):
        torch.manual_seed(call // 2)
        samples = torch.stack([model(x) for _ in range(5)])
        results[f"samples{call}"] = samples.cpu()
        results[f"spread{call}"] = samples.std(0).cpu()
        results[f"next number{call}"] = torch.rand(2, device=device).cpu()
results["repeats"] = torch.equal(results["samples0"], results["samples1"])
results["differs"] = not torch.equal(results["samples1"], results["samples2"])
results["fresh"] = not torch.equal(results["samples0"][0], results["samples0"][1])
torch.save(results, path)
