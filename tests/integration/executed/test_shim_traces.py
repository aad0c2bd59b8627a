"""Programs under `gpufaas exec` whose models are traced while other threads do something else."""

from pathlib import Path

from tests.kit.programs.executed_programs import ForkedPrograms, execute

OWN_BACKENDS = """
import torch
from torch._dynamo.backends.common import aot_autograd
from functorch.compile import make_boxed_func

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.rest = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

    def forward(self, x):
        return self.rest(self.first(x))

class Broken(Net):
    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.rest(y)

seen = []

def as_it_is(graph, examples):
    assert all(example.is_cuda for example in examples)
    seen.append(sum(node.op.startswith("call_") for node in graph.graph.nodes))
    return graph.forward

def called_later(graph, examples):
    seen.append(sum(node.op.startswith("call_") for node in graph.graph.nodes))
    return lambda *args: graph(*args)

def without_relu(graph, examples):
    for node in graph.graph.nodes:
        if node.target is torch.nn.functional.relu:
            node.target, node.kwargs = torch.neg, {}
    graph.recompile()
    return graph.forward

x = torch.ones(2, 4).cuda()
for backend in (as_it_is, called_later):
    for kind, graphs in ((Net, [3]), (Broken, [1, 2])):
        model = kind().cuda().eval()
        plain = model(x)
        compiled = torch.compile(model, backend=backend)
        in_function = torch.compile(lambda value: model(value), backend=backend)
        assert torch.allclose(compiled(x), plain) and torch.allclose(compiled(x), plain)
        assert seen == graphs, seen
        seen.clear()
        model.compile(backend=backend)
        assert torch.allclose(model(x), plain)
        torch._dynamo.reset()
        seen.clear()
        assert torch.allclose(in_function(x), plain) and seen == graphs, seen
        seen.clear()
model = Net().cuda().eval()
assert (torch.compile(model, backend=without_relu)(x) == -model.rest[0](model.first(x))).all()
failing = aot_autograd(fw_compiler=lambda graph, examples: make_boxed_func(graph.forward))
model = Net().cuda()
loss = torch.compile(model, backend=failing)(x).sum()
loss.backward()
assert model.first.weight.grad is not None
"""


def test_added_hook_is_noticed_in_every_thread_and_context(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
import asyncio
import contextvars
import torch
from concurrent.futures import ThreadPoolExecutor

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = torch.nn.LSTM(4, 4)
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.recurrent(x)[0])

models = [Tagger().cuda().eval() for _ in range(3)]

def notices(model):
    x = torch.ones(1, 2, 4).cuda()
    with torch.no_grad():
        before = model(x)
        hook = model.last.register_forward_hook(lambda *args: args[-1] * 2)
        after = model(x)
        hook.remove()
        return torch.allclose(after, before * 2) and torch.allclose(model(x), before)

async def in_tasks():
    return await asyncio.gather(*(asyncio.to_thread(notices, model) for model in models))

with ThreadPoolExecutor(3) as pool:
    assert all(pool.map(notices, models))
assert all(asyncio.run(in_tasks()))
assert contextvars.Context().run(notices, models[0])
import torch._dynamo
assert torch._dynamo.config.skip_nnmodule_hook_guards, "the user's own setting is changed"
assert not torch._dynamo.config.allow_rnn and not torch._dynamo.config.suppress_errors
"""
    done, counts = programs.execute(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert counts["local_calls"] == {}
    assert counts["graph_calls"] == 7 * 3  # one graph each: the recurrent layer does not split it


def test_random_numbers_do_not_repeat_when_a_trace_ends_meanwhile(tmp_path: Path) -> None:
    program = """
import random
import time
import torch
from torch_shim.process_report import report
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20))).cuda().eval()
x = torch.ones(1, 8).cuda()
torch.manual_seed(0)
random.seed(0)
drawn, drawn_by_python = [], []
ends_s = time.monotonic() + 150
with torch.no_grad():
    while time.monotonic() < ends_s and report.counts.graph_calls < 3:
        model(x)
        for _ in range(20):
            drawn.append(torch.rand(1).item())
            drawn_by_python.append(random.random())
            time.sleep(0.005)
alone, python_alone = torch.Generator().manual_seed(0), random.Random(0)
assert drawn == [torch.rand(1, generator=alone).item() for _ in drawn]
assert drawn_by_python == [python_alone.random() for _ in drawn_by_python]
"""
    done, counts = execute(program, tmp_path, "--tracing", "background")
    assert done.returncode == 0, done.stderr
    assert counts["graph_calls"] >= 1  # a trace was made meanwhile


def test_users_own_backend_sees_what_it_would_see_on_cuda(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    done, counts = programs.execute(OWN_BACKENDS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert counts["graph_calls"] >= 8  # graphs that the backend gives back run on the GPU


def test_calls_that_draw_at_once_draw_different_numbers(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

torch.manual_seed(0)
noise = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.5)).train().cuda()
x = torch.ones(1, 256).cuda()
with torch.no_grad():
    for _ in range(4):
        noise(x)
begin = threading.Barrier(8)

def draw(_):
    begin.wait()
    with torch.no_grad():
        return [tuple((noise(x).cpu() == 0).flatten().tolist()) for _ in range(10)]

with ThreadPoolExecutor(8) as pool:
    drawn = [one for some in pool.map(draw, range(8)) for one in some]
assert len(set(drawn)) == 80, len(set(drawn))
"""
    programs.counts_of(program, tmp_path)


def test_gradients_are_of_what_was_drawn_when_other_threads_draw_meanwhile(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
import threading
import time

import torch

class Noise(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x * self.weight)

torch.manual_seed(0)
modules = [Noise(256 + n).train().cuda() for n in range(9)]
for module in modules:
    for _ in range(3):
        module(torch.ones(module.weight.numel()).cuda())  # traced, and never differentiated
other, over, draws = modules.pop(), threading.Event(), []

def draw_on():
    while not over.is_set():
        with torch.no_grad():
            other(torch.ones(other.weight.numel()).cuda())
        draws.append(None)

drawing = [threading.Thread(target=draw_on) for _ in range(4)]
for thread in drawing:
    thread.start()
try:
    while len(draws) < 8:
        time.sleep(0.01)
    before, right = len(draws), []
    for module in modules:
        y = module(torch.ones(module.weight.numel()).cuda())
        y.sum().backward()
        right.append(torch.equal(module.weight.grad.cpu(), y.detach().cpu()))
    assert len(draws) > before, "nobody drew meanwhile"
finally:
    over.set()
    for thread in drawing:
        thread.join()
assert all(right), right
"""
    programs.counts_of(program, tmp_path)
