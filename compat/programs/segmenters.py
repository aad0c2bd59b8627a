"""Segments random pictures with a small model of segmentation_models_pytorch: ARCHITECTURE."""

import sys
import time

import segmentation_models_pytorch as smp
import torch

path, architecture = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = smp.create_model(architecture, "resnet18", encoder_weights=None, in_channels=3, classes=4)
model = model.to(device).eval()

results = {}
with torch.inference_mode():
    for call in range(3):
        pictures = torch.rand(2, 3, 64, 64).to(device)
        start = time.perf_counter()
        masks = model(pictures)
        results[f"masks{call}"] = masks.cpu()
        if call == 0:
            print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
        results[f"classes{call}"] = masks.argmax(1).to(torch.uint8).cpu()
    start = time.perf_counter()
    for _ in range(3):
        model(pictures).cpu()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
