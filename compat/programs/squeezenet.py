"""Classifies random pictures with a SqueezeNet: MODEL BATCH."""

import sys
import time

import torch
import torchvision

path, name, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torchvision.models.get_model(name, weights=None).to(device).eval()
size = 224 if batch == 1 else 96

results = {}
with torch.no_grad():
    for call in range(3):
        start = time.perf_counter()
        pictures = torch.rand(batch, 3, size, size).to(device)
        logits = model(pictures)
        results[f"logits{call}"] = logits.cpu()
        if call == 0:
            print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
        results[f"best{call}"] = logits.argmax(dim=1).tolist()
    start = time.perf_counter()
    for _ in range(3):
        model(pictures).cpu()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
