"""Trains a small network: Adam, a schedule, gradient clipping, evaluation in between: OPTIMIZER."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

path, optimizer_name = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(12, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)
).to(device)
optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

results = {"losses": []}
check = torch.randn(8, 12).to(device)
for step in range(6):
    model.train()
    x, y = torch.randn(16, 12).to(device), torch.randint(0, 3, (16,)).to(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    model.eval()
    with torch.no_grad():
        results[f"check{step}"] = model(check).cpu()
    results["losses"].append(loss.item())
    results[f"norm{step}"] = float(norm)
results["state"] = {key: value.cpu() for key, value in model.state_dict().items()}
torch.save(results, path)
