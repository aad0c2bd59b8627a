"""A module whose forward branches and loops on what it computes."""

import sys

import torch
from torch import nn


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.left = nn.Linear(32, 16)
        self.right = nn.Linear(32, 16)

    def forward(self, x, rounds=3):
        steps = 0
        while x.abs().max() > 0.2 and steps < rounds:
            h = self.inside(x)
            x = self.left(h) if h.sum().item() > 0 else self.right(h)
            steps += 1
        if (x > 0).any():
            x = torch.where(x > 0, x, 0.1 * x)
        return x, steps


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Router().to(device).eval()

results = {}
with torch.no_grad():
    for call in range(8):
        x = torch.randn(4, 16, device=device) * (call % 4 + 0.1)
        output, steps = model(x, rounds=2 + call)
        results[f"output{call}"] = output.cpu()
        results[f"steps{call}"] = steps
torch.save(results, path)
