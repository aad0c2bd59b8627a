"""Double and complex arithmetic, integers, booleans: dtypes that keep themselves."""

import sys

import torch
from torch import nn


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.real = nn.Linear(6, 6).double()
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x, count):
        wave = torch.fft.fft(self.real(x)).to(torch.complex64) * self.phase
        return wave.abs(), wave, (count // 2) % 3, x > 0, x.round().to(torch.int8)


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Mix().to(device).eval()

results = {}
with torch.no_grad():
    for call in range(3):
        x = torch.randn(2, 6, dtype=torch.float64, device=device)
        outputs = model(x, torch.tensor([call, 7, -5], device=device))
        results[f"dtypes{call}"] = [str(output.dtype) for output in outputs]
        results[f"outputs{call}"] = [output.cpu() for output in outputs]
torch.save(results, path)
