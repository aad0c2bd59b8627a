"""Classifies and embeds random pictures with a model of timm: MODEL SIZE."""

import sys
import time

import timm
import torch

path, name, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = timm.create_model(name, pretrained=False, num_classes=10).to(device).eval()

results = {}
with torch.inference_mode():
    start = time.perf_counter()
    results["first"] = model(torch.rand(2, 3, size, size).to(device)).cpu()
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    for call in range(2):
        pictures = torch.rand(2, 3, size, size).to(device)
        features = model.forward_features(pictures)
        results[f"scores{call}"] = model.forward_head(features).cpu()
        results[f"whole{call}"] = model(pictures).cpu()
        results[f"embedding{call}"] = model.forward_head(features, pre_logits=True).cpu()
    start = time.perf_counter()
    for _ in range(3):
        model(pictures).cpu()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
