"""Activation checkpointing gives the gradients that it gives without graphs, step after step."""

import pytest

from tests.kit.programs.snippets import Snippet

TRAINING = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return x + self.drop(self.second(torch.relu(self.first(x))))

class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.call = call

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x

def losses_on(device, call, outside=None):
    torch.manual_seed(0)
    model = Model(call).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        x = torch.randn(8, 4, device=device, requires_grad=True)
        loss = (outside(model, x) if outside else model(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    return found + [weight.sum().item() for weight in (*model.parameters(), *model.buffers())]

def plainly(block, x):
    return block(x)

def nested(block, x):
    return newer(lambda t: newer(block, t) * 1.5, x)

def normed(block, x):
    return newer(lambda t: block.norm(block(t)), x)

def in_half(block, x):
    def run(t):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = block(t)
            return y + block(t)
    return newer(run, x).float()

def newer(block, x, **options):
    return checkpoint(block, x, use_reentrant=False, **options)

def older(block, x):
    return checkpoint(block, x, use_reentrant=True)
"""


@pytest.mark.parametrize(
    "call",
    [
        "newer",
        "older",
        "lambda block, x: newer(block, x, debug=True)",
        "lambda block, x: newer(block, x, determinism_check='none')",
        "lambda block, x: checkpoint_sequential(nn.Sequential(block, nn.Tanh()), 2, x, False)",
        "nested",
        "normed",
        "in_half",
    ],
)
def test_checkpoint_inside_of_forward_trains_as_on_the_processor(
    tracing_shim: Snippet, call: str
) -> None:
    tracing_shim(f"""{TRAINING}
on_gpu, plain = (losses_on(device, {call}) for device in ("cuda", "cpu"))
assert on_gpu == plain, (on_gpu, plain)
""")


@pytest.mark.parametrize("way", ["newer", "older"])
def test_checkpoint_around_a_module_trains_as_on_the_processor(
    tracing_shim: Snippet, way: str
) -> None:
    tracing_shim(f"""{TRAINING}
on_gpu, plain = (losses_on(device, plainly, {way}) for device in ("cuda", "cpu"))
assert on_gpu == plain, (on_gpu, plain)
""")


@pytest.mark.parametrize("way", ["newer", "older"])
def test_older_checkpoint_within_another_gives_gradients_only_to_what_torch_does(
    tracing_shim: Snippet, way: str
) -> None:
    tracing_shim(f"""{TRAINING}
import warnings

warnings.simplefilter("ignore")  # torch's: an input of the inner one has no gradients

def within(block, x):
    return {way}(lambda t: older(block, t) * 1.5, x)

def gradients(device, recorded):
    torch.manual_seed(0)
    model = Model(within).to(device)
    model.tail = nn.Linear(4, 4).to(device)
    for _ in range(3):
        x = torch.randn(8, 4, device=device, requires_grad=recorded)
        model.tail(model(x)).square().mean().backward()
    return [None if w.grad is None else w.grad.sum().item() for w in model.parameters()]

for recorded in (True, False):
    on_gpu, plain = (gradients(device, recorded) for device in ("cuda", "cpu"))
    assert on_gpu == plain, (on_gpu, plain)
    assert recorded or plain[:-2].count(None) == len(plain[:-2])
""")


def test_older_checkpoint_in_a_graph_that_may_not_break_trains_as_torch_compile_does(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(f"""{TRAINING}
def gradients(device, recorded):
    torch.manual_seed(0)
    block = Block().to(device).eval()
    called = torch.compile(lambda x: older(block, x) * 2, fullgraph=True, backend="eager")
    for _ in range(3):
        called(torch.ones(8, 4, device=device, requires_grad=recorded)).square().mean().backward()
    return [None if w.grad is None else w.grad.sum().item() for w in block.parameters()]

for recorded in (True, False):
    on_gpu, plain = (gradients(device, recorded) for device in ("cuda", "cpu"))
    assert on_gpu == plain and None not in on_gpu[:4], (on_gpu, plain)
""")


def test_checkpoint_stays_in_its_graph_when_no_gradients_are_recorded(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(f"""{TRAINING}
from torch_shim.process_report import report

for call in (newer, older):
    model = Model(call).cuda().eval()
    with torch.no_grad():
        model(torch.randn(8, 4, device="cuda"))
assert report.counts.graphs == 2, report.counts
assert set(report.counts.local_calls) == {{"no GPU manager was named (GPUFAAS_ADDRESS)"}}
""")
