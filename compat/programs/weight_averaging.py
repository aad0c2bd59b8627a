"""An averaged copy kept while the model trains, pruned and reparametrised layers."""

import copy
import sys

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    parametrizations.weight_norm(nn.Linear(6, 12)),
    nn.ReLU(),
    parametrizations.spectral_norm(nn.Linear(12, 12)),
    nn.ReLU(),
    nn.Linear(12, 2),
).to(device)
average = AveragedModel(model)
shadow = copy.deepcopy(model)
pruned = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 2)).to(device)
optimizer = torch.optim.AdamW([*model.parameters(), *pruned.parameters()], lr=0.05)
prune.l1_unstructured(pruned[0], "weight", amount=0.3)

results = {}
check = torch.randn(3, 6).to(device)
for step in range(4):
    model.train()
    x = torch.randn(8, 6, device=device)
    optimizer.zero_grad()
    pruned(model(x)).square().mean().backward()
    optimizer.step()
    average.update_parameters(model)
    with torch.no_grad():
        for kept, new in zip(shadow.parameters(), model.parameters(), strict=True):
            kept.mul_(0.9).add_(new, alpha=0.1)
        for name, module in {"model": model, "average": average, "shadow": shadow}.items():
            module.eval()
            results[f"{name}{step}"] = module(check).cpu()
        results[f"pruned{step}"] = pruned(check[:, :2]).cpu()
    if step == 2:
        prune.remove(pruned[0], "weight")
results["zeros"] = int((pruned[0].weight == 0).sum())
torch.save(results, path)
