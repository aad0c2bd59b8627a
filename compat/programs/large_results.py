"""Results of many bytes, most of whose sizes are no multiple of a cache line: KIND."""

import sys

import torch
from torch import nn

path, kind = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Parts(nn.Module):
    """Several results of odd sizes and types."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x):
        y = self.layer(x)
        return y, (y > 0)[:-1], y.argmax(-1), y.to(torch.float16)[1:], (y * 9).to(torch.uint8)


class Empty(nn.Module):
    """A large result, an empty one, and one number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        y = self.layer(x)
        return y, y[:0], y.sum()


rows, model = {
    "odd_rows": (100_001, nn.Linear(4, 7)),
    "megabyte": ((1 << 18) + 1, nn.Linear(2, 1)),
    "parts": (70_003, Parts()),
    "empty": (300_001, Empty()),
    "masks": (257, nn.Sequential(nn.Linear(6, 4099), nn.Sigmoid())),
}[kind]
first = next(model.parameters()).shape[1]
model = model.to(device).eval()
results = {}
with torch.no_grad():
    for call in range(3):
        found = model(torch.randn(rows - call, first).to(device))
        found = found if isinstance(found, tuple) else (found,)
        results[f"parts{call}"] = [part.cpu() for part in found]
torch.save(results, path)
