"""Classifies pictures, prepared by torchvision's transforms, with a ResNet: MODEL BATCH."""

import sys
import time

import numpy as np
import torch
from PIL import Image
from torchvision import models, transforms

path, name, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
size = 224 if batch == 1 else 64
prepare = transforms.Compose(
    [
        transforms.Resize(size + 16),
        transforms.CenterCrop(size),
        transforms.ToTensor(),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
)
model = getattr(models, name)()
model = model.to(device)
model.eval()
noise = np.random.default_rng(0)


def picture():
    return Image.fromarray(noise.integers(0, 255, (240, 260, 3), dtype=np.uint8))


results = {}
for call in range(3):
    start = time.perf_counter()
    inputs = torch.stack([prepare(picture()) for _ in range(batch)]).to(device)
    with torch.inference_mode():
        output = model(inputs)
        probabilities = torch.nn.functional.softmax(output, dim=1)
    top, categories = torch.topk(probabilities, 5)
    results[f"output{call}"] = output.cpu()
    if call == 0:
        print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    results[f"top{call}"] = top.cpu()
    results[f"categories{call}"] = categories[0].tolist()

with torch.inference_mode():
    start = time.perf_counter()
    for _ in range(3):
        model(inputs).cpu()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
