"""Estimates the motion between frames with RAFT, a recurrent network."""

import sys

import torch
from torchvision.models.optical_flow import raft_small

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = raft_small(weights=None).to(device).eval()

results = {}
with torch.no_grad():
    for call in range(3):
        first = torch.rand(1, 3, 128, 128, device=device) * 2 - 1
        second = torch.roll(first, shifts=call + 1, dims=3)
        flows = model(first, second, num_flow_updates=4)
        results[f"count{call}"] = len(flows)
        results[f"flow{call}"] = flows[-1].cpu()
torch.save(results, path)
