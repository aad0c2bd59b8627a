"""Whole programs under `gpufaas exec` that select rows of what stays with the worker, as beam
search does of its cache: the selections wait, and are what they would have been at once."""

from pathlib import Path

import pytest

from tests.kit.programs.executed_programs import KILL_WORKERS, ForkedPrograms

# Three caches of 128 KiB that grow in each step.
STEP = """
import copy, gc, os, threading
import torch
from torch_shim.remote import operators_there
from torch_shim.tensors import absent_bytes

class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x, caches):
        grown = []
        for layer, cache in zip(self.layers, caches):
            x = layer(x)
            grown.append(torch.cat([cache, x], 1))
            x = torch.tanh(x + grown[-1].mean(1, keepdim=True))
        return x, grown

torch.manual_seed(0)
step = Step().eval()
x, caches = torch.randn(4, 1, 64), [torch.randn(4, 128, 64) for _ in range(3)]
torch.set_grad_enabled(False)

def search(x, caches, device, steps=6):
    for number in range(steps):
        x, caches = step(x, caches)
        rows = torch.tensor([number % 4, 3, 0, 0], device=device)
        caches = [cache.index_select(0, rows) for cache in caches]
        rows.zero_()  # too late
    return x, caches

expected, grown = search(x, caches, "cpu")
alone = step(x, caches)[1]
chosen = torch.tensor([2, 0, 0, 1])
on_cpu, step = step, copy.deepcopy(step).cuda()
x, caches = x.cuda(), [cache.cuda() for cache in caches]

def on_gpu():
    # What only the worker has, and rows to select.
    return step(x, caches)[1], chosen.cuda()

def waiting():
    return len(operators_there._selections._waiting)
"""


def test_step_takes_the_selections_before_it_along(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{STEP}
got, there = search(x, caches, "cuda")
assert waiting() == 3
assert torch.equal(got.cpu(), expected)
assert len(absent_bytes.unmade) == 6  # the results, and what they are made from
del there
assert not waiting() and not absent_bytes.unmade
"""
    counts = programs.counts_of(program, tmp_path)
    assert counts["graph_calls"] == 6 + 1  # before the first call of the program for any size
    assert counts["bytes_out"] < 128 << 10


def test_selections_are_what_they_would_have_been_at_once(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{STEP}
got, there = search(x, caches, "cuda")
assert waiting() == 3
assert all(map(torch.equal, [cache.cpu() for cache in there], grown)) and not waiting()
assert not absent_bytes.unmade
"""
    programs.counts_of(program, tmp_path)


# What happens to a selection `picked` of `source` by `rows`, both of which are on the GPU, and what
# it has to be then; `was` is the source on the CPU.
EVENTS = {
    "index written to": "rows.fill_(1); want = was[chosen]",
    "index replaced": "rows.data = rows.data * 0; want = was[chosen]",
    "source looked at": "assert torch.equal(source.cpu(), was); want = was[chosen]",
    "source written to": "source.add_(1); want = was[chosen]",
    "source replaced": "source.data = source.data * 0; want = was[chosen]",
    "source gone": "del source; gc.collect(); want = was[chosen]",
    "written to": "picked.mul_(2); want = was[chosen] * 2",
    "view of it": "picked = picked[1:, 5:].mT; want = was[chosen][1:, 5:].mT",
    "selected from again": "picked = picked.index_select(0, rows); want = was[chosen][chosen]\n"
    "assert waiting() == 1",
    "little of it selected": "picked = picked.index_select(1, rows)\nwant = was[chosen][:, chosen]",
    "made contiguous": "step(x, caches)[1][2].transpose(0, 1).contiguous()  # a copy\n"
    "same = picked.contiguous()  # none\n"
    "same.add_(1); want = was[chosen] + 1",
    "other end": "picked = source.index_select(-1, rows); want = was[..., chosen]",
    "twice": "other = source.index_select(0, rows.flip(0)); want = was[chosen]\n"
    "assert torch.equal(other.cpu(), was[chosen.flip(0)])",
    "of a part": "picked = source[:, 3:].index_select(0, rows); want = was[chosen][:, 3:]",
    "used by a model": "want = was[chosen]; after = step(x, [picked, *caches[1:]])[1][0]\n"
    "assert torch.equal(after.cpu()[:, :-1], want)",
    "in inference mode": """
with torch.inference_mode():
    picked = source.index_select(0, rows)
want = was[chosen]""",
    "looked at by other threads": """
seen = []
threads = [threading.Thread(target=lambda: seen.append(picked.cpu())) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
want = was[chosen]
assert len(seen) == 4 and all(torch.equal(one, want) for one in seen)""",
    "in a forked child": """
want = was[chosen]
child = os.fork()
if not child:
    # Of a few numbers: no child has the threads by which torch would compare more of them.
    os._exit(0 if picked[0, 0].tolist() == want[0, 0].tolist() else 1)
assert os.waitpid(child, 0)[1] == 0""",
    "many": """
several = [source.index_select(0, rows) for _ in range(600)]
want = was[chosen]
assert all(torch.equal(one.cpu(), want) for one in several[::-100])""",
}


@pytest.mark.parametrize("event", EVENTS)
def test_selection_is_not_changed_by_what_happens_before_it_runs(
    programs: ForkedPrograms, tmp_path: Path, event: str
) -> None:
    program = f"""
{STEP}
(source, *_), rows = on_gpu()
was = alone[0]
picked = source.index_select(0, rows)
assert waiting() == 1 and picked.is_cuda and picked.is_contiguous()
{EVENTS[event]}
assert picked.shape == want.shape and torch.equal(picked.cpu(), want)
assert not absent_bytes.unmade
"""
    programs.counts_of(program, tmp_path)


def test_source_that_a_model_writes_to_is_selected_from_before(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{STEP}
class Writes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, cache):
        cache.add_(1)
        return self.layer(cache).sum()

writes = Writes().eval().cuda()
for _ in range(4):
    (source, *_), rows = on_gpu()
    picked = source.index_select(0, rows)
    writes(source).item()
    assert torch.equal(picked.cpu(), alone[0][chosen])
    assert torch.equal(source.cpu(), alone[0] + 1)
"""
    programs.counts_of(program, tmp_path)


def test_model_gets_what_was_selected_however_it_is_passed(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{STEP}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.step = torch.nn.Linear(64, 64), step

    def forward(self, what, *inputs):
        if what == "step":
            return self.step(*inputs)
        cache, other = inputs
        if what == "writes":
            return self.layer(cache.add_(1)).sum()
        if what == "reads":
            return self.layer(cache) + self.layer(other).mean()
        return self.layer(other), cache[1:]

model = Model().eval()
ways = [
    lambda one, two: (one, two),
    lambda one, two: (one, one),
    lambda one, two: (one[:2], two),
    lambda one, two: (one.view(2, 2, -1, 64), two),
    lambda one, two: (one.transpose(0, 1), two),
    lambda one, two: (one.transpose(0, 1).view(torch.int32).view(torch.float32), two),
]
was, other = alone[:2]
wanted = [model("reads", *way(was[chosen], other[chosen])) for way in ways]
given = model("gives", was[chosen], other)
model.cuda()
(source, second, _), rows = model("step", x, caches)[1], chosen.cuda()
for _ in range(3):
    for way, want in zip(ways, wanted):
        picked = source.index_select(0, rows), second.index_select(0, rows)
        assert waiting() == 2
        assert torch.allclose(model("reads", *way(*picked)).cpu(), want, atol=1e-6)
        assert torch.equal(picked[0].cpu(), was[chosen])
    picked = source.index_select(0, rows)
    got, part = model("gives", picked, second)
    assert torch.allclose(got.cpu(), given[0], atol=1e-6)
    part.add_(1)  # what a model gives of its input is that input's
    assert torch.equal(picked[1:].cpu(), was[chosen][1:] + 1)
    picked = source.index_select(0, rows)
    model("writes", picked, second)
    assert torch.equal(picked.cpu(), was[chosen] + 1)
"""
    programs.counts_of(program, tmp_path)


def test_answer_is_not_used_if_a_source_was_written_to_meanwhile(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{STEP}
from torch_shim.remote import program as programs
others = [cache.cpu() for cache in caches[1:]]
wanted = on_cpu(x.cpu(), [alone[1][chosen], *others])[1][0]
(_, source, _), rows = on_gpu()
join, times = programs.joined_calls[-1], []

def join_and_write(*call):
    joined = join(*call)
    if joined is not None:
        times.append(len(times))
        writer = threading.Thread(target=lambda: source.add_(1))
        writer.start()
        writer.join()
    return joined

programs.joined_calls.append(join_and_write)
for _ in range(2):
    (_, source, _), rows = on_gpu()  # of this one nobody looks at
    picked = source.index_select(0, rows)
    after = step(x, [picked, *caches[1:]])[1][0]
    assert torch.allclose(after.cpu(), wanted, atol=1e-6)
assert times == [0]
"""
    programs.counts_of(program, tmp_path)


def test_rows_that_are_not_there_are_refused_at_once(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{STEP}
(source, *_), rows = on_gpu()
for wrong in (rows + 2, rows - 1):
    try:
        source.index_select(0, wrong)
    except (IndexError, RuntimeError):
        continue
    raise AssertionError("rows that are not there were selected")
assert not waiting()
"""
    programs.counts_of(program, tmp_path)


@pytest.mark.parametrize("dies", ["waiting", "made"])
def test_selection_is_made_when_the_worker_died(
    programs: ForkedPrograms, tmp_path: Path, dies: str
) -> None:
    program = f"""
{STEP}
{KILL_WORKERS}
got, there = search(x, caches, "cuda")
if {dies == "made"}:
    absent_bytes.make_for(there)
assert waiting() == (0 if {dies == "made"} else 3)
assert kill_workers() >= 1
assert all(map(torch.equal, [cache.cpu() for cache in there], grown))
"""
    programs.counts_of(program, tmp_path)


def test_selection_is_what_it_was_when_its_source_came_with_another_output(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{STEP}
{KILL_WORKERS}
(source, other, _), rows = on_gpu()
picked = source.index_select(0, rows)
assert kill_workers() >= 1
assert torch.equal(other.cpu(), alone[1])  # computed again, and the source with it
source.add_(1)
assert torch.equal(picked.cpu(), alone[0][chosen])
"""
    programs.counts_of(program, tmp_path)


def test_what_was_computed_from_a_selection_that_was_looked_at_is_computed_again(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{STEP}
{KILL_WORKERS}
(source, *_), rows = on_gpu()
for _ in range(3):
    picked = source.index_select(0, rows)
    assert torch.equal(picked.cpu(), alone[0][chosen])
after = step(x, [picked, *caches[1:]])[1][0]
del picked
gc.collect()
assert kill_workers() >= 1
assert torch.equal(after.cpu()[:, :-1], alone[0][chosen])
"""
    programs.counts_of(program, tmp_path)


def test_selection_is_made_here_when_the_model_is_gone(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{STEP}
(source, *_), rows = on_gpu()
picked = source.index_select(0, rows)
del step, source
gc.collect()
assert torch.equal(picked.cpu(), alone[0][chosen])
"""
    programs.counts_of(program, tmp_path)


def test_selection_that_cannot_be_made_says_so(programs: ForkedPrograms, tmp_path: Path) -> None:
    program = f"""
{STEP}
{KILL_WORKERS}
(source, other, _), rows = on_gpu()
picked = source.index_select(0, rows)
caches[0].add_(1)  # the worker's copy was computed with what nobody has any more
assert kill_workers() >= 1
for _ in range(2):
    try:
        picked.cpu()
    except RuntimeError as error:
        assert "CUDA error" in str(error), error
    else:
        raise AssertionError("a lost selection was read")
caches[0].sub_(1)
(source, *_), rows = on_gpu()
assert torch.allclose(source.index_select(0, rows).cpu(), alone[0][chosen], atol=1e-6)
assert waiting() == 1
del picked
assert not waiting()
"""
    programs.counts_of(program, tmp_path)
