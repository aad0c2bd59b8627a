"""Programs whose calls are recorded, for tests that run them under `gpufaas exec`."""

from pathlib import Path

from tests.kit.programs.executed_programs import ForkedPrograms

# `again(model, x)` is an answer, and whether a recording gave it.
RECORDED = """
import threading
import torch
from torch_shim.process_report import report

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
x = torch.randn(3, 4)

def native(x, model=model):
    return torch.nn.functional.linear(
        torch.relu(torch.nn.functional.linear(x, model[0].weight.cpu(), model[0].bias.cpu())),
        model[2].weight.cpu(), model[2].bias.cpu(),
    )

def again(model, *inputs):
    before = report.counts.recorded_calls
    with torch.no_grad():
        answer = model(*(each.cuda() for each in inputs))
    return answer.cpu(), report.counts.recorded_calls > before

def recorded(model, *inputs):
    for _ in range(6):
        answer, is_recorded = again(model, *inputs)
    assert is_recorded, report.counts
    return answer

with torch.no_grad():
    expected = model(x)
model = model.cuda()
"""


# Modules with a state; `asked(...)` is an answer, and whether a recording gave it.
STATES = """
class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * 0 + torch.rand_like(x)

class Counting(Noisy):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += x.sum()
        return self.layer(x) * 0 + self.count

class Cached(Noisy):  # a cache of 64 KiB and more stays with the worker
    def forward(self, x, at, cache):
        cache.index_add_(0, at, x)
        return self.layer(x) * 0 + cache[:4].sum(0)

def asked(module, *inputs):
    before = report.counts.recorded_calls
    with torch.no_grad():
        answer = module(*inputs)
    return answer.cpu(), report.counts.recorded_calls > before

recorded(model, x)
one, at = torch.ones(1, 4).cuda(), torch.tensor([1]).cuda()
"""


def run_recorded(programs: ForkedPrograms, folder: Path, program: str) -> None:
    """Run such a program, which has calls that are recorded."""
    done, counts = programs.execute(RECORDED + program + '\nprint("well")\n', folder)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert counts["recorded_calls"], counts
