"""Stops after as many blocks as it takes to be sure, returning None for the ones not run."""

import sys

import torch
from torch import nn


class EarlyExit(nn.Module):
    def __init__(self, blocks=4, width=32, classes=5):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks)
        )
        self.heads = nn.ModuleList(nn.Linear(width, classes) for _ in range(blocks))

    def forward(self, x, sure):
        answers = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            answer = (6 * head(x)).softmax(-1)
            answers.append(answer)
            if answer.max() >= sure:
                break
        return answers + [None] * (len(self.blocks) - len(answers))


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = EarlyExit().to(device).eval()

results = {}
with torch.inference_mode():
    for call, sure in enumerate([0.1, 0.6, 0.39, 0.39, 0.99, 0.5, 0.45]):
        answers = model(torch.randn(1, 32).to(device), sure)
        results[f"run{call}"] = sum(answer is not None for answer in answers)
        results[f"answers{call}"] = [None if a is None else a.cpu() for a in answers]
torch.save(results, path)
