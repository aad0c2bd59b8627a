"""FlexAttention with a mask and a score of its own: USE."""

import sys

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

path, use = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def causal(batch, head, query, key):
    return query >= key


def nearer(score, batch, head, query, key):
    return score - (query - key).abs() * 0.1


class Attention(nn.Module):
    """Heads of a layer's output, attended flexibly."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.layer(x).unflatten(-1, (3, 2, 8)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mask = create_block_mask(causal, 1, 1, x.shape[1], x.shape[1], device=x.device)
        return flex_attention(q, k, v, score_mod=nearer, block_mask=mask)


results = {}
with torch.no_grad():
    if use == "module":
        model = Attention().to(device).eval()
        for call in range(2):
            results[f"y{call}"] = model(torch.randn(2, 128, 16).to(device)).cpu()
    else:
        q, k, v = (torch.randn(1, 2, 128, 16).to(device) for _ in range(3))
        results["y"] = flex_attention(q, k, v, score_mod=nearer).cpu()
torch.save(results, path)
