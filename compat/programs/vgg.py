"""Features and classes of random pictures with a VGG: MODEL BATCH."""

import sys
import time

import torch
from torchvision import models

path, name, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = models.get_model(name, init_weights=False).eval().to(device)
size = 224 if batch == 1 else 64

results = {}
for call in range(3):
    start = time.perf_counter()
    pictures = torch.rand(batch, 3, size, size).to(device)
    with torch.no_grad():
        features = model.features(pictures)
        pooled = model.avgpool(features).flatten(1)
        scores = model.classifier(pooled)
        whole = model(pictures)
    results[f"features{call}"] = features.mean(dim=(2, 3)).cpu()
    if call == 0:
        print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    results[f"scores{call}"] = scores.cpu()
    results[f"same{call}"] = torch.allclose(scores, whole, rtol=1e-3, atol=1e-4)

with torch.no_grad():
    start = time.perf_counter()
    for _ in range(3):
        model(pictures).cpu()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
