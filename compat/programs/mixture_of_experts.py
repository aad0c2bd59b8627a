"""Sends each token to the two best of its experts: indexes, counts and scatters by the data."""

import sys

import torch
from torch import nn


class Mixture(nn.Module):
    def __init__(self, width=24, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            output.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return output, torch.bincount(chosen.flatten(), minlength=len(self.experts))


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Mixture().to(device).eval()

results = {}
with torch.inference_mode():
    for call in range(4):
        output, load = model(torch.randn(6, 24).to(device))
        results[f"output{call}"] = output.cpu()
        results[f"load{call}"] = load.tolist()
torch.save(results, path)
