"""Trains with autocast and a gradient scaler."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device, init_scale=1024.0)

results = {"losses": []}
for _ in range(5):
    x, y = torch.randn(8, 10, device=device), torch.randint(0, 2, (8,), device=device)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    results["losses"].append(loss.item())
model.eval()
with torch.no_grad():
    results["output"] = model(torch.ones(2, 10, device=device)).cpu()
results["weights"] = [p.detach().cpu() for p in model.parameters()]
torch.save(results, path)
