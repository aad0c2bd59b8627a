"""Plain PyTorch, with no word of gpufaas in it: classifies eight made-up pictures."""

import time

import torch
from torchvision.models import resnet50

device = "cuda" if torch.cuda.is_available() else "cpu"
print(f"torch {torch.__version__} computes on {device}", flush=True)

torch.manual_seed(0)
model = resnet50().eval().to(device)
pictures = torch.rand(8, 1, 3, 224, 224)

with torch.no_grad():
    for number, picture in enumerate(pictures):
        start_s = time.perf_counter()
        scores = model(picture.to(device))
        best = int(scores.argmax())
        took_ms = (time.perf_counter() - start_s) * 1000
        print(f"picture {number}: class {best} on {scores.device} in {took_ms:.0f} ms", flush=True)
