"""Classifies random pictures with any classifier of torchvision: MODEL SIZE."""

import sys
import time

import torch
from torchvision import models

path, name, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = models.get_model(name, weights=None).eval().to(device)

results = {"parameters": sum(p.numel() for p in model.parameters())}
for call, batch in enumerate([1, 1, 2, 1]):
    start = time.perf_counter()
    pictures = torch.rand(batch, 3, size, size)
    with torch.inference_mode():
        scores = model(pictures.to(device))
    results[f"scores{call}"] = scores.float().cpu()
    if call == 0:
        print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")

pictures = torch.rand(1, 3, size, size).to(device)
with torch.inference_mode():
    start = time.perf_counter()
    for _ in range(3):
        model(pictures).cpu()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
