"""Trains a small model with an optimizer: NAME."""

import sys

import torch
from torch import nn

path, name = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1, bias=False)).to(device)
matrices = [weight for weight in model.parameters() if weight.dim() == 2]
HOW = {"SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True}, "Muon": {"lr": 0.01}}
trained = matrices if name == "Muon" else list(model.parameters())
optimizer = getattr(torch.optim, name)(trained, **HOW.get(name, {"lr": 0.01}))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
x, y = torch.randn(16, 5).to(device), torch.randn(16, 1).to(device)
losses = []


def step():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss


for _ in range(4):
    losses.append(float(optimizer.step(step)))
    scheduler.step()
model.eval()
with torch.no_grad():
    results = {"after": model(x).cpu()}
results["losses"] = losses
results["weights"] = {key: value.cpu() for key, value in model.state_dict().items()}
torch.save(results, path)
