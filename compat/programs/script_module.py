"""A scripted model with control flow, saved, loaded onto the device and called."""

import io
import sys

import torch
from torch import nn


class Repeat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        for _ in range(times):
            if x.sum() > 0:
                x = self.layer(x)
            else:
                x = x + 1
        return x


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
scripted = torch.jit.script(Repeat().eval())
scripted = scripted.to(device)
file = io.BytesIO()
torch.jit.save(scripted, file)
file.seek(0)
loaded = torch.jit.load(file, map_location=device)

results = {}
with torch.no_grad():
    for call in range(4):
        x = torch.randn(2, 6).to(device)
        results[f"scripted{call}"] = scripted(x, call).cpu()
        results[f"loaded{call}"] = loaded(x, call).cpu()
torch.save(results, path)
