"""The same model on many shapes, some of them empty or single."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(128, 10),
)
model.to(device).eval()

results = {}
shapes = [(1, 32, 32), (2, 32, 32), (3, 20, 41), (1, 17, 17), (0, 32, 32), (5, 9, 64), (1, 32, 32)]
with torch.no_grad():
    for call, (batch, height, width) in enumerate(shapes):
        x = torch.randn(batch, 3, height, width, device=device)
        y = model(x)
        results[f"scores{call}"] = y.cpu()
        results[f"shape{call}"] = list(y.shape)
torch.save(results, path)
