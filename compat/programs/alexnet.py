"""Classifies random pictures with AlexNet and forgets no_grad: MODEL BATCH."""

import sys
import time

import torch
from torchvision.models import alexnet

path, _, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = alexnet()
model.eval()
if torch.cuda.is_available():
    model.cuda()

results = {}
for call in range(3):
    start = time.perf_counter()
    pictures = torch.rand(batch, 3, 224, 224)
    if torch.cuda.is_available():
        pictures = pictures.cuda()
    scores = model(pictures)
    results[f"scores{call}"] = torch.from_numpy(scores.detach().cpu().numpy())
    if call == 0:
        print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    results[f"recorded{call}"] = scores.requires_grad

start = time.perf_counter()
for _ in range(3):
    model(pictures).cpu()
print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
