"""Calls models whose forward is written in the many ways of research code: STYLE."""

import functools
import logging
import math
import random
import sys
import warnings
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

path, style = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
warnings.simplefilter("ignore")
log = logging.getLogger("model")
results = {}


def block(width=16):
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


class Logged(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = block(), block()

    def forward(self, x):
        log.info("shape %s", x.shape)
        h = self.first(x)
        log.debug("hidden %s", tuple(h.shape))
        if h.shape[0] > 100:
            log.warning("large")
        return self.second(h)


class Printed(Logged):
    def forward(self, x):
        h = self.first(x)
        print("hidden", h.shape, h.dtype)
        return self.second(h)


class Warned(Logged):
    def forward(self, x):
        warnings.warn("this forward is deprecated", FutureWarning, stacklevel=2)
        return self.second(self.first(x))


class Asserted(Logged):
    def forward(self, x):
        assert x.dim() == 2, f"expected two dimensions, got {x.dim()}"
        h = self.first(x)
        if torch.isnan(h).any():
            raise ValueError("not a number")
        return self.second(h)


class Branching(Logged):
    def forward(self, x):
        h = self.first(x)
        if h.mean() > 0:
            h = h * 2
        return self.second(h)


class Counting(Logged):
    calls = 0

    def forward(self, x):
        self.calls += 1
        Counting.total = getattr(Counting, "total", 0) + 1
        return self.second(self.first(x)) * (1 + 0 * self.calls)


class Timed(Logged):
    def forward(self, x):
        import time

        start = time.perf_counter()
        h = self.first(x)
        self.took = time.perf_counter() - start
        return self.second(h)


class Rounded(Logged):
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x)
            return torch.round(x * scale) / scale

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    def forward(self, x):
        return self.second(self.Round.apply(self.first(x), 8))


class Masked(Logged):
    def forward(self, x):
        h = self.first(x)
        h[h < 0] = 0
        kept = h[:, h.sum(0) > 0.5]
        return self.second(F.pad(kept, (0, 16 - kept.shape[1])))


class Cached(Logged):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        if x.shape not in self.cache:
            self.cache[x.shape] = torch.arange(x.shape[0], device=x.device)[:, None] / 10
        return self.second(self.first(x) + self.cache[x.shape])


class Memoised(Logged):
    @functools.lru_cache(maxsize=8)  # noqa: B019 - as people write it
    def table(self, length):
        angles = torch.arange(length).float()[:, None] / 10000 ** (torch.arange(8) / 8)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, x):
        return self.second(self.first(x) + self.table(x.shape[0]).to(x.device))


class Scheduled(Logged):
    def forward(self, x, timestep):
        half = 8
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        angles = timestep.float()[:, None] * frequencies[None]
        return self.second(self.first(x) + torch.cat([angles.cos(), angles.sin()], dim=-1))


class Routed(Logged):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(block() for _ in range(4))

    def forward(self, x):
        chances, chosen = self.gate(x).softmax(-1).topk(2)
        answer = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel():
                answer[rows] += expert(x[rows]) * chances[rows, places, None]
        return answer


class Iterated(Logged):
    def forward(self, x):
        for step in range(20):
            new = self.first(x)
            if (new - x).abs().max().item() < 0.2 and step > 2:
                break
            x = x + 0.5 * (new - x)
        return self.second(x)


class Sampled(Logged):
    def forward(self, x):
        depth = random.randint(1, 1)
        noise = torch.randn_like(x) + torch.rand(x.shape[0], 1, device=x.device)
        for _ in range(depth):
            x = self.first(x + noise * np.random.uniform(0.1, 0.1))
        return self.second(F.dropout(x, 0.2, training=True))


class Decorated(Logged):
    @torch.no_grad()
    def forward(self, x):
        return self.second(self.first(x)).detach()


class Autocasting(Logged):
    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = self.first(x)
        with torch.autocast(device_type=x.device.type, enabled=False):
            return self.second(h.float())


class Sized(Logged):
    def forward(self, xs: list[Tensor]):
        sizes = [len(x) for x in xs]
        joined = self.second(self.first(torch.cat(xs)))
        return torch.stack([part.mean(0) for part in joined.split(sizes)])


class Answer(NamedTuple):
    logits: Tensor
    hidden: list[Tensor]


class Collected(Logged):
    def forward(self, x):
        seen = defaultdict(list)
        for layer in (*self.first, *self.second):
            x = layer(x)
            seen[type(layer).__name__].append(x)
        return Answer(x, [value for values in seen.values() for value in values])


class Gradients(Logged):
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = self.first(x).square().sum()
            (force,) = torch.autograd.grad(energy, x)
        return self.second(-force)


class Generated(Logged):
    def layers(self):
        yield self.first
        yield self.second

    def forward(self, x):
        for layer in self.layers():
            x = x + layer(x)
        return sum(part for part in x.chunk(2, dim=-1))


class Devices(Logged):
    def forward(self, x):
        where = next(self.parameters()).device
        kind = next(self.parameters()).dtype
        mask = torch.ones(x.shape[0], x.shape[0], device=where, dtype=torch.bool).tril()
        bias = torch.zeros(1, dtype=kind).to(where) + 0.5 * len(str(x.is_cuda)[:3])
        scores = (x @ x.T).masked_fill(~mask, torch.finfo(x.dtype).min).softmax(-1)
        return self.second(self.first(scores @ x) + bias.to(x))


class Recursive(Logged):
    def visit(self, tree):
        if isinstance(tree, Tensor):
            return self.first(tree)
        left, right = (self.visit(part) for part in tree)
        return self.second(left + right)

    def forward(self, x):
        return self.visit((x, ((x * 2, x - 1), x)))


class Strings(Logged):
    def forward(self, x, mode="mean", names=("a", "b")):
        h = {
            name: getattr(self, which)(x)
            for name, which in zip(names, ("first", "second"), strict=True)
        }
        pooled = getattr(torch, mode)(torch.stack([h[name] for name in sorted(h)]), dim=0)
        return torch.einsum("bi,bi->b", pooled, x) if mode.startswith("m") else pooled


class Tried(Logged):
    def forward(self, x):
        try:
            h = self.first(x)
            if h.shape[-1] != 3:
                raise KeyError("width")
        except KeyError:
            h = self.second(x)
        finally:
            x = x + 1
        return h + x


model_class = next(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and kind.__name__.lower() == style
)
model = model_class().to(device).eval()
with torch.no_grad():
    for call in range(4):
        x = torch.randn(6, 16).to(device)
        if style == "scheduled":
            found = model(x, torch.full((6,), call).to(device))
        elif style == "sized":
            found = model([x, x[:2], x[: call + 1]])
        else:
            found = model(x)
        found = (
            found.logits + sum(part.mean() for part in found.hidden)
            if style == "collected"
            else found
        )
        results[f"found{call}"] = found.cpu()
torch.save(results, path)
