"""Convolutions in the channels-last memory format."""

import sys

import torch
from torchvision.models import mobilenet_v2

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = mobilenet_v2().eval().to(device, memory_format=torch.channels_last)

results = {}
with torch.no_grad():
    for call in range(3):
        pictures = torch.rand(2, 3, 64, 64).to(device, memory_format=torch.channels_last)
        features = model.features(pictures)
        scores = model(pictures)
        results[f"format{call}"] = features.is_contiguous(memory_format=torch.channels_last)
        results[f"input format{call}"] = pictures.is_contiguous(memory_format=torch.channels_last)
        results[f"strides{call}"] = list(features.stride())
        results[f"scores{call}"] = scores.cpu()
torch.save(results, path)
