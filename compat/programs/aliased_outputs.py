"""Outputs that are the input, views of it, views of one another or of a weight; then written to."""

import sys

import torch
from torch import nn


class Aliases(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x):
        y = self.mix(x)
        left, right = y.chunk(2, dim=1)
        return x, x.t(), y, left, right, self.mix.weight[0]


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Aliases().to(device).eval()

results = {}
with torch.no_grad():
    for call in range(4):
        x = torch.randn(4, 6).to(device)
        same, turned, whole, left, right, row = model(x)
        results[f"is input{call}"] = same is x
        left.fill_(call)
        right.add_(1)
        turned[0] = 5
        row.mul_(0.5)
        results[f"whole{call}"] = whole.cpu()
        results[f"input{call}"] = x.cpu()
        results[f"weight{call}"] = model.mix.weight.detach().clone().cpu()
torch.save(results, path)
