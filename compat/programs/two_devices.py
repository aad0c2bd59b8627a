"""Asks for the second device where there is a first: KIND of asking."""

import sys

import torch
from torch import nn

path, kind = sys.argv[1], sys.argv[2]
torch.manual_seed(0)
model = nn.Linear(4, 2)
x = torch.randn(3, 4)
if torch.cuda.is_available():
    if kind == "tensor":
        x = x.to("cuda:1")
    elif kind == "factory":
        x = torch.zeros(3, 4, device="cuda:1")
    elif kind == "module":
        model.to("cuda:1")
    else:
        torch.cuda.set_device(1)
torch.save({"y": model(x).detach()}, path)
