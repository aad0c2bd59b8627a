"""Calls the parts of a model by themselves, other methods than forward, and parts in a loop."""

import sys

import torch
from torch import nn


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
        self.words = nn.Embedding(60, 32)
        self.out = nn.Linear(32, 60)

    def encode(self, source):
        return self.encoder(self.words(source))

    def decode(self, target, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1), device=target.device)
        return self.out(self.decoder(self.words(target), memory, tgt_mask=mask))

    def forward(self, source, target):
        return self.decode(target, self.encode(source))


path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = Translator().to(device).eval()

results = {}
with torch.no_grad():
    for call in range(3):
        source = torch.randint(0, 60, (1, 7), device=device)
        memory = model.encode(source)
        target = torch.zeros(1, 1, dtype=torch.long, device=device)
        for _ in range(5):
            best = model.decode(target, memory)[:, -1:].argmax(-1)
            target = torch.cat([target, best], dim=1)
        results[f"target{call}"] = target.cpu()
        results[f"whole{call}"] = model(source, target).cpu()
        results[f"part{call}"] = model.encoder.layers[0](model.words(source)).cpu()
torch.save(results, path)
