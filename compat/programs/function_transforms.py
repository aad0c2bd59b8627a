"""Transforms a model's function with torch.func: KIND."""

import sys

import torch
from torch import nn
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

path, kind = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device).eval()
weights = {name: value.detach() for name, value in model.named_parameters()}


def batched(x):
    return vmap(model)(x)


def nested(x):
    return vmap(vmap(model))(torch.stack([x, x]))


def gradient(x):
    return grad(lambda one: model(one).sum())(x)


def weight_gradient(x):
    found = grad(lambda given: functional_call(model, given, (x,)).square().sum())(weights)
    return torch.cat([value.flatten() for value in found.values()])


def for_each_sample(x):
    def loss(given, one):
        return functional_call(model, given, (one,)).square().sum()

    return vmap(grad(loss), in_dims=(None, 0))(weights, x)["0.weight"]


def jacobian(x):
    return torch.stack([jacrev(model)(x[0]), jacfwd(model)(x[0])])


def second_derivative(x):
    return hessian(lambda one: model(one).sum())(x[0])


def forward_derivative(x):
    return torch.stack(jvp(model, (x,), (torch.ones_like(x),)))


def backward_derivative(x):
    output, back = vjp(model, x)
    return back(torch.ones_like(output))[0]


def replaced_weights(x):
    return functional_call(model, {name: value * 2 for name, value in weights.items()}, (x,))


def ensemble(x):
    models = [nn.Linear(4, 3).to(device) for _ in range(3)]
    stacked, buffers = stack_module_state(models)
    base = nn.Linear(4, 3, device="meta")
    return vmap(lambda w, b: functional_call(base, (w, b), (x,)))(stacked, buffers).detach()


def random_batched(x):
    return vmap(lambda one: model(one) + torch.rand(3, device=device), randomness="different")(x)


results = {}
for call in range(2):
    found = globals()[kind](torch.randn(5, 4).to(device))
    results[f"found{call}"] = found.detach().cpu()
torch.save(results, path)
