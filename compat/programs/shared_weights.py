"""An embedding tied to the output layer, and one block used three times."""

import sys

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, words=120, width=24):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.block = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.again = self.block
        self.output = nn.Linear(width, words, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in (self.block, self.again, self.block):
            x = x + block(x)
        return self.output(x)


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Tied().to(device).eval()

results = {"tied": model.output.weight is model.embedding.weight}
results["parameters"] = len(list(model.parameters()))
with torch.no_grad():
    for call in range(4):
        tokens = torch.randint(0, 120, (2, 6)).to(device)
        results[f"logits{call}"] = model(tokens).cpu()
        model.embedding.weight[call] += 1
        results[f"seen{call}"] = torch.equal(
            model.output.weight[call], model.embedding.weight[call]
        )
torch.save(results, path)
