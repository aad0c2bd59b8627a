"""A module that writes into its input, into views of what it made, and into its own buffer."""

import sys

import torch
from torch import nn


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8, bias=False)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        x.mul_(2)
        y = self.mix(x).relu_()
        y[:, ::2] += 1
        y[0].zero_()
        y[y > 2] = 2
        view = y.view(-1)
        view[-1] = 7
        self.seen += y.sum(dim=0)
        self.seen[0] = x.size(0)
        return y.add_(x)


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Writer().to(device).eval()

results = {}
with torch.no_grad():
    for call in range(5):
        x = torch.randn(3 + call // 3, 8, device=device)
        view = x[:2]
        results[f"output{call}"] = model(x).cpu()
        results[f"input{call}"] = x.clone().cpu()
        results[f"view{call}"] = view.clone().cpu()
        results[f"seen{call}"] = model.seen.clone().cpu()
        x.neg_()
        results[f"negated{call}"] = view.clone().cpu()
torch.save(results, path)
