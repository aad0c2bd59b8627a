"""Buffers changed between calls in several ways: the next call must see it."""

import sys

import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("offset", None)
        self.constant = torch.zeros(5)

    def forward(self, x):
        y = self.layer(x) * self.scale + self.constant.to(x.device)
        return y if self.offset is None else y + self.offset


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Scaled().to(device).eval()
x = torch.randn(2, 5).to(device)
changes = [
    lambda: model.scale.mul_(2),
    lambda: model.scale.data.fill_(3),
    lambda: setattr(model, "scale", torch.full((5,), 0.5, device=device)),
    lambda: setattr(model, "offset", torch.ones(5, device=device)),
    lambda: model.offset.neg_(),
    lambda: setattr(model, "offset", None),
    lambda: model.constant.add_(4),
    lambda: setattr(model, "constant", torch.arange(5.0)),
    lambda: model._buffers.__setitem__("scale", torch.ones(5, device=device)),
    lambda: model.register_buffer("scale", torch.zeros(5, device=device)),
]
results = {}
with torch.no_grad():
    for call, change in enumerate(changes):
        results[f"before{call}"] = model(x).cpu()
        results[f"again{call}"] = model(x).cpu()
        change()
        results[f"after{call}"] = model(x).cpu()
torch.save(results, path)
