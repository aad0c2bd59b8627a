"""Classifies short clips with a video model: MODEL."""

import sys

import torch
from torchvision.models import video

path, name = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = getattr(video, name)(weights=None).to(device).eval()

results = {}
with torch.inference_mode():
    for call in range(3):
        frames = torch.randint(0, 255, (8, 64, 64, 3), dtype=torch.uint8)
        clip = frames.to(device).permute(3, 0, 1, 2).unsqueeze(0).float().div_(255)
        scores = model(clip)
        results[f"scores{call}"] = scores.cpu()
        results[f"best{call}"] = scores.topk(3).indices.cpu()
torch.save(results, path)
