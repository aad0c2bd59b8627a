"""A program under `gpufaas exec` that changes what its model reads while the model is traced."""

from pathlib import Path

import pytest

from tests.kit.programs.executed_programs import counts_of, execute

pytestmark = pytest.mark.group("changed_while_traced", seconds=90)

CHANGING = """
import time
import torch
from torch_shim.process_report import report
dev = "cuda"
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(10))
        self.items = []
        self.table = {}
        self.sign = 1
    def forward(self, x, cache):
        y = x
        for layer in self.layers:
            y = layer(y)
        for item in self.items: y = y + item
        for name in sorted(self.table): y = y * self.table[name]
        return y * self.sign + sum(entry.sum() for entry in cache["entries"])
def expected(model, x, cache):
    y = x
    for weight, bias in weights: y = y @ weight.T + bias
    for item in model.items: y = y + item
    for name in sorted(model.table): y = y * model.table[name]
    return y * model.sign + sum(float(len(entry)) for entry in cache["entries"])
torch.manual_seed(0)
model = Net().eval()
weights = [(layer.weight.detach().clone(), layer.bias.detach().clone()) for layer in model.layers]
model = model.to(dev)
x = torch.ones(1, 4); on_gpu = x.to(dev)
cache = {"entries": []}
n = wrong = 0
ends = time.monotonic() + 150
with torch.no_grad():
    while time.monotonic() < ends and report.counts.graph_calls < 20:
        for step in range(6):
            if step % 2: model.items.append(2.0)
            else: model.items.clear()
            model.sign = 1 if step % 3 else -1
            if step % 3 == 1: model.table["double"] = 2.0
            else: model.table.pop("double", None)
            cache["entries"].append(torch.ones(1 + step).to(dev))
            if len(cache["entries"]) > 3: cache["entries"].clear()
            want = expected(model, x, cache)
            got = model(on_gpu, cache).cpu()
            n += 1
            if not torch.allclose(got, want, atol=1e-4): wrong += 1
            model.items.extend([9.0]*3); del model.items[-3:]
            time.sleep(0.001)
print(n, "wrong", wrong)
assert not wrong
"""


def test_answers_are_right_when_everything_changes_while_a_trace_is_made(tmp_path: Path) -> None:
    done, counts = execute(CHANGING, tmp_path, "--tracing", "background")
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts["graph_calls"] >= 1


ALTERNATING = """
import time
import torch
from torch_shim.process_report import report
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x, cache):
        cache.append(self.layer(x).sum(0))
        return cache[-1] + len(cache)
model = Net().eval().cuda()
one, many = torch.ones(1, 4, device="cuda"), torch.ones(5, 4, device="cuda")
def in_graph(x):
    before = report.counts.graph_calls
    with torch.no_grad():
        model(x, [])
    return report.counts.graph_calls > before
def until(x, others):
    ends = time.monotonic() + 100
    while not in_graph(x):
        assert time.monotonic() < ends, "it is never traced"
        for other in others:
            in_graph(other)
        time.sleep(0.01)
until(one, [])
until(many, [one, one])
"""


def test_way_of_calling_is_traced_though_others_have_graphs(tmp_path: Path) -> None:
    counts_of(ALTERNATING, tmp_path, "--tracing", "background")
