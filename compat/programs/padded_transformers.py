"""Transformer encoders of torch.nn over padded sequences, in evaluation and in training mode."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Classifier(nn.Module):
    """Words in, one class for each sentence out."""

    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(50, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16))
        self.head = nn.Linear(16, 3)

    def forward(self, ids):
        hidden = self.encoder(self.words(ids), src_key_padding_mask=ids == 0)
        return self.head(hidden.mean(1)), hidden


sentences = torch.randint(1, 50, (4, 9))
for row, length in enumerate((9, 4, 6, 7)):
    sentences[row, length:] = 0
in_front = sentences.flip(1)
results = {}
for name, options in {"relu": {}, "gelu": {"activation": "gelu"}}.items():
    model = Classifier(**options).to(device).eval()
    for kind, ids in {"behind": sentences, "shorter": sentences[1:, :7], "front": in_front}.items():
        with torch.no_grad():
            results[f"{name} {kind}"] = [part.cpu() for part in model(ids.to(device))]
    with torch.inference_mode():
        results[f"{name} again"] = [part.cpu() for part in model(sentences.to(device))]
attention = nn.MultiheadAttention(16, 4, batch_first=True).to(device).eval()
values = torch.randn(4, 9, 16, device=device)
with torch.no_grad():
    found = attention(values, values, values, key_padding_mask=(sentences == 0).to(device))
results["attention"] = [part.cpu() for part in found]
torch.save(results, path)
