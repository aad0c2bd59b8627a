"""Recommends with embedding bags over ragged lists of items."""

import sys

import torch
from torch import nn


class Recommender(nn.Module):
    def __init__(self, items=300, width=16):
        super().__init__()
        self.history = nn.EmbeddingBag(items, width, mode="mean")
        self.weighted = nn.EmbeddingBag(items, width, mode="sum", include_last_offset=True)
        self.user = nn.Embedding(50, width)
        self.score = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, items))

    def forward(self, users, items, offsets, weights):
        ends = torch.cat([offsets, offsets.new_tensor([items.numel()])])
        parts = [
            self.user(users),
            self.history(items, offsets),
            self.weighted(items, ends, per_sample_weights=weights),
        ]
        return self.score(torch.cat(parts, dim=1))


path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = Recommender().to(device).eval()

results = {}
for call, lengths in enumerate([[3, 1, 4], [2, 2, 2], [5, 1, 3], [3, 1, 4]]):
    items = torch.randint(0, 300, (sum(lengths),)).to(device)
    offsets = torch.tensor([0, *lengths[:-1]]).cumsum(0).to(device)
    users = torch.randint(0, 50, (len(lengths),)).to(device)
    with torch.no_grad():
        scores = model(users, items, offsets, torch.rand(items.shape).to(device))
    results[f"scores{call}"] = scores.cpu()
    results[f"best{call}"] = scores.topk(5, dim=1).indices.cpu()
torch.save(results, path)
