"""Segments random pictures with a torchvision model: MODEL."""

import sys
import time

import torch
from torchvision.models import segmentation

path, name = sys.argv[1], sys.argv[2]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=21)
model.eval().to(device)

results = {}
with torch.no_grad():
    for call, (height, width) in enumerate([(128, 160), (128, 160), (160, 128)]):
        start = time.perf_counter()
        picture = torch.rand(1, 3, height, width, device=device)
        output = model(picture)["out"]
        mask = output.argmax(1)
        results[f"output{call}"] = output.cpu()
        if call == 0:
            print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
        results[f"pixels{call}"] = torch.bincount(mask.flatten(), minlength=21).cpu()
    start = time.perf_counter()
    for _ in range(3):
        model(picture)["out"].cpu()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
