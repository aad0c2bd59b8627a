"""Shapes that depend on values: pooling by batch, selections by a mask, experts, unique values."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Pooled(nn.Module):
    """Means of the rows of each graph in a batch, as libraries of graph networks have it."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x, batch):
        graphs = int(batch.max()) + 1
        sums = x.new_zeros(graphs, 8).index_add_(0, batch, self.mix(x))
        counts = x.new_zeros(graphs).index_add_(0, batch, torch.ones_like(batch, dtype=x.dtype))
        return sums / counts.clamp(min=1)[:, None]


class Messages(nn.Module):
    """Edges without those from a node to itself, which all get one anew."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x, batch):
        edges = torch.stack([batch, batch.flip(0)])
        edges = edges[:, edges[0] != edges[1]]
        own = torch.arange(x.size(0), device=x.device).repeat(2, 1)
        edges = torch.cat([edges, own], dim=1)
        return torch.zeros_like(x).index_add(0, edges[1], self.mix(x)[edges[0]])


class Experts(nn.Module):
    """Each row goes to one of three experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, batch):
        chosen = self.gate(x).argmax(-1)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            found.index_add_(0, rows, expert(x[rows]))
        return found, torch.unique(batch), found[found > 0].mean()


class Scaled(nn.Module):
    """Python numbers of values, and a branch on one."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x, batch):
        mixed = self.mix(x)
        mixed = mixed * mixed.abs().max().item() + float(mixed.min())
        rows = int((mixed[:, 0] > 0).sum())
        if rows > 2:
            mixed = mixed + 1
        return (
            mixed[:rows],
            mixed.split(torch.tensor([2, 6]).tolist(), dim=1)[1],
            batch.max().item(),
        )


results = {}
for model in (Pooled(), Messages(), Experts(), Scaled()):
    model.to(device).eval()
    for size in (6, 7, 9):
        x = torch.randn(size, 8, device=device)
        batch = torch.randint(0, size // 2, (size,), device=device).sort().values
        with torch.no_grad():
            found = model(x, batch)
        parts = found if isinstance(found, tuple) else (found,)
        results[f"{type(model).__name__} {size}"] = [
            part.cpu() if isinstance(part, torch.Tensor) else part for part in parts
        ]
torch.save(results, path)
