"""torch.func: a model called with other weights, an ensemble by vmap, gradients per sample."""

import sys

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
models = [nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(device) for _ in range(3)]
parameters, buffers = stack_module_state(models)
base = models[0]


def call(weights, buffer, x):
    return functional_call(base, (weights, buffer), (x,))


def loss(weights, x, y):
    return (functional_call(base, weights, (x[None],))[0] - y).square().sum()


results = {}
for number in range(3):
    x = torch.randn(4, 5).to(device)
    y = torch.randn(4, 1).to(device)
    weights = {name: p.detach() * (number + 1) for name, p in base.named_parameters()}
    results[f"plain{number}"] = base(x).detach().cpu()
    results[f"other{number}"] = functional_call(base, weights, (x,)).cpu()
    results[f"ensemble{number}"] = vmap(call, (0, 0, None))(parameters, buffers, x).detach().cpu()
    samples = vmap(grad(loss), (None, 0, 0))(weights, x, y)
    results[f"gradients{number}"] = {name: value.cpu() for name, value in samples.items()}
torch.save(results, path)
