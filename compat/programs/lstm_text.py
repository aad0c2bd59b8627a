"""Classifies sequences of several lengths with an embedding and a two-layer LSTM."""

import sys

import torch
from torch import nn


class TextClassifier(nn.Module):
    def __init__(self, words=200, width=48, classes=4):
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.lstm = nn.LSTM(width, 64, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(64, classes)

    def forward(self, tokens):
        hidden, (last, _) = self.lstm(self.embedding(tokens))
        return self.head(last[-1] + hidden.mean(dim=1))


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = TextClassifier().to(device).eval()

results = {}
with torch.no_grad():
    for call, (batch, length) in enumerate([(2, 10), (2, 15), (3, 10), (2, 10)]):
        tokens = torch.randint(0, 200, (batch, length), device=device)
        results[f"scores{call}"] = model(tokens).cpu()
torch.save(results, path)
