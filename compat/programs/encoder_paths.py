"""Layers of torch.nn that have a fast path in eval: CASE."""

import sys

import torch
from torch import nn

path, case = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
how = {"batch_first": True, "dropout": 0.0}
layer = nn.TransformerEncoderLayer(16, 4, 32, **how)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=case != "no_nesting")
if case == "norm_first":
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, norm_first=True, **how), 2, enable_nested_tensor=False
    )
elif case == "attention":
    model = nn.MultiheadAttention(16, 4, batch_first=True)
elif case == "one_layer":
    model = layer
elif case == "gelu":
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", **how), 2
    )
elif case == "embedded":
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16))
model = model.to(device).eval()
results = {}
with torch.no_grad():
    for call in range(3):
        x = torch.randn(3, 7, 16).to(device)
        padding = torch.arange(7)[None] >= torch.tensor([[7], [4], [2 + call]])
        padding = padding.to(device)
        if case == "attention":
            seen, weights = model(x, x, x, key_padding_mask=padding)
            results[f"weights{call}"] = weights.cpu()
        elif case == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(7, device=device)
            seen = model(x, mask=mask, is_causal=True)
        elif case == "unpadded":
            seen = model(x)
        else:
            seen = model(x, src_key_padding_mask=padding)
        results[f"seen{call}"] = seen.cpu()
torch.save(results, path)
