"""Memory shared with NumPy on the host side, raw storages, and DLPack."""

import sys

import numpy as np
import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Linear(6, 3).to(device).eval()
array = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)

results = {}
with torch.no_grad():
    for call in range(3):
        x = torch.from_numpy(array)
        results[f"y{call}"] = model(x.to(device)).cpu()
        array += 1
        storage = model.bias.untyped_storage()
        storage.copy_(torch.full((3,), float(call)).untyped_storage())
        results[f"bias{call}"] = model.bias.detach().cpu().clone()
        host = torch.arange(3.0) * call
        shared = torch.from_dlpack(host)
        host += 1
        results[f"shared{call}"] = shared
        model.weight.data.set_(torch.full((3, 6), 0.1 * call, device=device))
results["bytes"] = model.weight.untyped_storage().nbytes()
results["last"] = model(torch.ones(1, 6, device=device)).detach().cpu()
torch.save(results, path)
