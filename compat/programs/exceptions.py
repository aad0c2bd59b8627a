"""Errors inside a model reach the program as they are, and the model goes on working."""

import sys

import torch
from torch import nn


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x, limit=10.0):
        y = self.layer(x)
        if limit < 0:
            raise ValueError(f"limit must not be negative, not {limit}")
        if y.abs().max() > limit:
            raise OverflowError("too large")
        return y


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Picky().to(device).eval()
results = {}
calls = [
    (torch.randn(2, 5), 10.0),
    (torch.randn(2, 4), 10.0),
    (torch.randn(2, 5), -1.0),
    (torch.randn(2, 5) * 1000, 10.0),
    (torch.ones(2, 5, dtype=torch.long), 10.0),
    (torch.randn(2, 5), 10.0),
]
for number, (x, limit) in enumerate(calls):
    try:
        with torch.no_grad():
            results[f"output{number}"] = model(x.to(device), limit=limit).cpu()
    except (RuntimeError, ValueError, OverflowError) as error:
        results[f"error{number}"] = type(error).__name__
        if not isinstance(error, RuntimeError):
            results[f"words{number}"] = str(error)
torch.save(results, path)
