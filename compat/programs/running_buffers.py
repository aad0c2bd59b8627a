"""Buffers that forward updates: batch norm in training mode, a counter and a moving average."""

import sys

import torch
from torch import nn


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("average", torch.zeros(10), persistent=False)
        self.history = []

    def forward(self, x):
        self.calls += 1
        self.average = 0.9 * self.average + 0.1 * x.mean(dim=0)
        self.history.append(x.size(0))
        return self.norm(x) * self.calls + self.average


path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = Tracker().to(device)

results = {}
for call in range(6):
    model.train(call < 3)
    with torch.no_grad():
        results[f"output{call}"] = model(torch.randn(8, 10, device=device)).cpu()
    results[f"mean{call}"] = model.norm.running_mean.clone().cpu()
    results[f"batches{call}"] = int(model.norm.num_batches_tracked)
    results[f"calls{call}"] = model.calls.item()
    results[f"average{call}"] = model.average.cpu()
results["history"] = model.history
results["saved"] = sorted(model.state_dict())
torch.save(results, path)
