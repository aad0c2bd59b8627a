"""Three steps of training with activation checkpointing, in every way that torch has for it."""

import functools
import itertools
import sys
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

WIDTH = 16
warnings.simplefilter("ignore")  # torch's, about those who do not say `use_reentrant`


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.narrow(torch.relu(self.wide(self.norm(x)))))


class Counting(Block):
    """A repetition in the backward pass counts again, as it does for the running statistics."""

    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(self.batch(x))


def branching(block, x):
    x = block(x)
    return x * 1.1 if x.sum().item() > 0 else x


def products(ctx, operator, *args, **kwargs):
    kept = "mm" in str(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def without_early_stop(block, x):
    with set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


def nested(block, x):
    return checkpoint(
        lambda t: checkpoint(block, t, use_reentrant=False) * 1.5, x, use_reentrant=False
    )


def older_within(block, x):
    return newer(lambda t: older(block, t) * 1.5, x)


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, products)
newer = functools.partial(checkpoint, use_reentrant=False)
older = functools.partial(checkpoint, use_reentrant=True)
WAYS = {
    "newer": newer,
    "older": older,
    "unsaid": checkpoint,
    "unchecked": functools.partial(newer, determinism_check="none"),
    "debugged": functools.partial(newer, debug=True),
    "selective": functools.partial(newer, context_fn=SELECTIVE),
    "branching": lambda block, x: newer(branching, block, x),
    "whole": without_early_stop,
    "nested": nested,
    "older_within": older_within,
}


class Model(nn.Module):
    def __init__(self, way, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.way = way

    def forward(self, x):
        if self.way.startswith("sequential"):
            body = nn.Sequential(*self.blocks)
            x = checkpoint_sequential(body, 2, x, use_reentrant=self.way.endswith("older"))
        else:
            for block in self.blocks:
                x = WAYS[self.way](block, x) if self.way in WAYS else block(x)
        return self.head(x)


def called(model, x):
    if model.way == "outside":
        return newer(model, x)
    if model.way == "autocast":
        with torch.autocast(device, dtype=torch.bfloat16):
            return newer(model, x).float()
    return model(x)


path, device = sys.argv[1], "cuda" if torch.cuda.is_available() else "cpu"
results = {}
ways = (*WAYS, "sequential", "sequential_older", "outside", "autocast")
for way, block in itertools.product(ways, (Block, Counting)):
    torch.manual_seed(0)
    model = Model(way, block).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    name = f"{way} {block.__name__}"
    for step in range(3):
        x, target = torch.randn(8, WIDTH, device=device), torch.randint(0, 4, (8,), device=device)
        loss = nn.functional.cross_entropy(called(model, x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results[f"{name} {step}"] = loss.detach().cpu()
    results |= {f"{name} {key}": value.cpu() for key, value in model.state_dict().items()}
torch.save(results, path)
