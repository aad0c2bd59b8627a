"""Training flags, precision, device and gradients switched between calls."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
model = model.to(device)
x = torch.randn(10, 6).to(device)
results = {}


def ask(name, inputs=x):
    torch.manual_seed(1)
    output = model(inputs)
    results[name] = output.detach().float().cpu()
    results[f"{name}, recorded"] = output.requires_grad
    results[f"{name}, mean"] = model[1].running_mean.clone().float().cpu()


for turn in range(2):
    model.eval()
    with torch.no_grad():
        ask(f"evaluation {turn}")
        ask(f"evaluation {turn} again")
    model.train()
    ask(f"training {turn}")
    model[2].eval()
    with torch.inference_mode():
        ask(f"no dropout {turn}")
    model[1].eval()
    model.requires_grad_(False)
    ask(f"frozen {turn}")
    model.requires_grad_(True)
    torch.set_grad_enabled(False)
    ask(f"switched off {turn}")
    torch.set_grad_enabled(True)
    model.double()
    ask(f"double {turn}", x.double())
    model.float()
    model.cpu()
    ask(f"on the host {turn}", x.cpu())
    model.to(device)
    ask(f"back {turn}")
torch.save(results, path)
