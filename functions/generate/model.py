"""A small decoder-only transformer over bytes, with a key-value cache of fixed size."""

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

VOCABULARY = 256


class Block(nn.Module):
    """Attention over everything before, then two linear layers."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_widening = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x, keys, values, positions, mask):
        """The block's output, and the cache with this step in it."""
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).chunk(3, dim=-1)
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        keys = keys.index_copy(2, positions, key)
        values = values.index_copy(2, positions, value)
        seen = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(gelu(self.widen(self.before_widening(x)))), keys, values


class Transformer(nn.Module):
    """Logits for the next byte."""

    def __init__(self, width=256, heads=4, layers=4, longest=512):
        super().__init__()
        self.width, self.heads, self.layers, self.longest = width, heads, layers, longest
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens, positions, cache):
        """What follows the last of these tokens, and the cache to pass next time."""
        every = torch.arange(self.longest, device=tokens.device)
        mask = every[None, :] <= positions[:, None]
        x = self.tokens(tokens) + self.places(positions)
        grown = []
        for number, block in enumerate(self.blocks):
            keys, values = cache[2 * number], cache[2 * number + 1]
            x, keys, values = block(x, keys, values, positions, mask)
            grown += [keys, values]
        return self.logits(self.norm(x[:, -1])), grown

    def empty_cache(self, device):
        """Keys and values of every layer, before the first token."""
        shape = (1, self.heads, self.longest, self.width // self.heads)
        return [torch.zeros(shape, device=device) for _ in range(2 * self.layers)]
