"""Inputs and outputs in dicts, tuples, named tuples and dataclasses, optional and keyword ones."""

import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn


@dataclass
class Batch:
    pictures: torch.Tensor
    words: dict
    weight: float = 1.0
    note: str = ""


class Scores(NamedTuple):
    pictures: torch.Tensor
    words: torch.Tensor


@dataclass
class Answer:
    scores: Scores
    parts: dict
    extra: list
    note: str


class Multi(nn.Module):
    def __init__(self):
        super().__init__()
        self.pictures = nn.Linear(12, 6)
        self.words = nn.ModuleDict({"title": nn.Linear(4, 6), "body": nn.Linear(5, 6)})

    def forward(self, batch, *extra, scale=None, **options):
        pictures = self.pictures(batch.pictures) * batch.weight
        words = {name: self.words[name](batch.words[name]) for name in sorted(batch.words)}
        total = torch.stack(list(words.values())).sum(0)
        if scale is not None:
            total = total * scale
        if options.get("negate"):
            total = -total
        parts = {"words": words, "count": len(words), "none": None}
        return Answer(Scores(pictures, total), parts, [e + 1 for e in extra], batch.note.upper())


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Multi().to(device).eval()

results = {}
with torch.no_grad():
    for call in range(5):
        words = {"title": torch.randn(2, 4).to(device), "body": torch.randn(2, 5).to(device)}
        batch = Batch(torch.randn(2, 12).to(device), words, note=f"call {call // 3}")
        if call > 2:
            batch = replace(batch, weight=0.5)
        extra = [torch.ones(2, device=device) * call] * (call % 2)
        options = {"negate": True} if call == 2 else {}
        answer = model(batch, *extra, scale=2.0 if call % 2 else None, **options)
        results[f"kind{call}"] = [type(answer).__name__, type(answer.scores).__name__]
        results[f"pictures{call}"] = answer.scores.pictures.cpu()
        results[f"words{call}"] = answer.scores.words.cpu()
        results[f"title{call}"] = answer.parts["words"]["title"].cpu()
        results[f"extra{call}"] = [e.cpu() for e in answer.extra]
        results[f"note{call}"] = answer.note
torch.save(results, path)
