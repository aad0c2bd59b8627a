"""Classifies random pictures with Inception v3: MODEL BATCH."""

import sys
import time

import torch
from torchvision.models import inception_v3

path, _, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = inception_v3(weights=None, init_weights=False).to(device)
model.eval()
size = 299 if batch == 1 else 96

results = {}
with torch.inference_mode():
    for call in range(3):
        start = time.perf_counter()
        pictures = torch.randn(batch, 3, size, size, device=device)
        scores = model(pictures)
        results[f"scores{call}"] = scores.cpu()
        if call == 0:
            print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
        results[f"best{call}"] = [int(row.argmax()) for row in scores]
    start = time.perf_counter()
    for _ in range(3):
        model(pictures).cpu()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
