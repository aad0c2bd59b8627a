"""NumPy's numbers and tables in a forward, views of complex numbers, `.data`."""

import sys

import numpy as np
import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Positions(nn.Module):
    """Attention as many write it: NumPy's square root, a table made by NumPy."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = np.float32(0.5)

    def forward(self, x):
        length, size = x.shape[-2:]
        angles = np.arange(64)[:, None] / np.power(10000, 2 * np.arange(size) / size)
        table = torch.from_numpy(np.sin(angles)).to(x)
        x = x + table[:length]
        scores = self.queries(x) @ self.keys(x).mT / np.sqrt(size)
        return (scores * self.scale + np.log2(length)).softmax(-1) @ x


class Spectrum(nn.Module):
    """Real and imaginary parts."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        found = torch.fft.fft(self.mix(x))
        return found.real, found.imag, found.real.square() + found.imag.square(), found.abs()


class Detached(nn.Module):
    """`.data`, and other attributes of a tensor."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        mixed = self.mix(x)
        return mixed.data * 2, mixed.mT, x.data.clone().mul_(3), mixed.H if mixed.dim() == 2 else x


results = {}
for model in (Positions(), Spectrum(), Detached()):
    model.to(device).eval()
    for length in (4, 6, 9):
        with torch.no_grad():
            found = model(torch.randn(2, length, 8, device=device))
        parts = found if isinstance(found, tuple) else (found,)
        results[f"{type(model).__name__} {length}"] = [part.cpu() for part in parts]
torch.save(results, path)
