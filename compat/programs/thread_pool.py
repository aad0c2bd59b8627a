"""A thread pool that serves several models, a new shape now and then, weights changed between."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
models = [
    nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)),
    nn.Sequential(nn.Flatten(), nn.Linear(20, 5)),
]
for model in models:
    model.to(device).eval()
    model(torch.zeros(1, 1, 20, device=device))


@torch.inference_mode()
def answer(which, x):
    return models[which](x.to(device)).softmax(-1).cpu()


results = {}
with ThreadPoolExecutor(max_workers=3) as pool:
    for turn in range(3):
        asked = [(n % 2, torch.randn(1 + n % 3, 1, 20)) for n in range(9)]
        for number, value in enumerate(pool.map(answer, *zip(*asked, strict=True))):
            results[f"{turn}.{number}"] = value
        models[1][1].weight.data.mul_(0.5)
torch.save(results, path)
