"""Whole programs under `gpufaas exec` whose large tensors lie in memory shared with the worker."""

from pathlib import Path

from tests.kit.places import ROOT
from tests.kit.programs.executed_programs import KILL_WORKERS, ForkedPrograms

DOUBLING = """
import gc, os, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.weight + 1

net = Net().eval().cuda()
base = torch.arange(1_000_001, dtype=torch.float32)  # 4 MB, and no multiple of a page
torch.set_grad_enabled(False)

def right(result, start):
    return torch.equal(result.cpu(), (base + start) * 2 + 1)
"""


def test_results_stay_as_they_are_when_later_calls_use_files_again(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{DOUBLING}
held = []
for start in range(12):
    result = net((base + start).cuda())
    copy = result.cpu()
    assert torch.equal(copy, (base + start) * 2 + 1)
    if start % 3 == 0:
        held.append((start, result, copy))  # the others are gone: their files are written again
    del result, copy
    for number, kept, copied in held:
        assert right(kept, number) and torch.equal(copied, (base + number) * 2 + 1)
"""
    counts = programs.counts_of(program, tmp_path)
    assert counts["bytes_in"] == 0, "inputs were copied, not read where they are"


def test_copies_and_handles_are_independent_when_one_of_them_is_written(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{DOUBLING}
for start in range(6):
    x = (base + start).cuda()
    result = net(x)
    copy = result.cpu()
    again = result[5:].cpu()
    copy[7] = -1
    assert right(result, start) and again[2] == (7 + start) * 2 + 1
    result[9] = -2
    later = result.cpu()
    assert later[9] == -2 and later[7] == (7 + start) * 2 + 1 and copy[9] == (9 + start) * 2 + 1
    x[3] = 100
    assert net(x)[3] == 201 and copy[3] == (3 + start) * 2 + 1
    view = result.data
    view.add_(1)
    assert result.cpu()[9] == -1 and later[9] == -2
"""
    programs.counts_of(program, tmp_path)


def test_child_and_parent_have_their_own_tensors_when_a_process_forks(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{DOUBLING}
torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork, with and without a shim
x = (base + 1).cuda()
for _ in range(3):
    result, copy = net(x.add_(0)), net((base + 2).cuda()).cpu()
told, tell = os.pipe()
child = os.fork()
if not child:
    os.close(tell)
    os.read(told, 1)  # until the parent has written, and its worker too
    same = torch.equal(x.cpu(), base + 1) and right(result, 1) and right(copy, 2)
    os._exit(0 if same else 1)
x.mul_(-1)
del result, copy
gc.collect()
for start in range(5):
    assert right(net((base - start).cuda()), -start)
assert torch.equal(net(x).cpu(), (base + 1) * -2 + 1)
os.write(tell, b"x")
assert os.waitpid(child, 0)[1] == 0, "the child saw what its parent wrote"
"""
    programs.counts_of(program, tmp_path)


def test_results_are_right_when_the_worker_dies_between_calls(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{DOUBLING}
import signal, time
{KILL_WORKERS}
results = []
for start in range(6):
    x = (base + start).cuda()
    result = net(x)
    result.cpu()
    results.append((start, result))
    if start % 2:
        kill_workers()
    for number, kept in results:
        assert right(kept, number)
"""
    programs.counts_of(program, tmp_path)


def test_output_that_lies_in_an_input_is_the_same_when_the_input_is_sparse(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x[1:], x.contiguous(), x * self.weight

torch.set_grad_enabled(False)
net = Net().eval()
plain = torch.arange(300.0)
expected = net(plain[::3])
net, there = net.cuda(), plain.cuda()
for _ in range(3):
    got = net(there[::3])
    for one, other in zip(got, expected, strict=True):
        assert one.stride() == other.stride() and torch.equal(one.cpu(), other)
    got[0].zero_()
    assert there[3] == 0 and there[4] == 4 and got[1][1] == 3
    there[3::3] = plain[3::3].cuda()
"""
    counts = programs.counts_of(program, tmp_path)
    assert counts["graph_calls"] == 3


def test_storage_is_right_when_a_program_writes_to_it_through_two_inputs(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
import math, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, a, b):
        a.add_(1)
        b.mul_(self.weight)
        return (a.sum() + b.sum()) * 1

torch.set_grad_enabled(False)
net = Net().eval()
plain = torch.arange(70_000.0)
wanted = []
for _ in range(4):
    wanted.append(float(net(plain[:60_000], plain[50_000:])))
net, there = net.cuda(), torch.arange(70_000.0).cuda()
for number in range(4):
    found = float(net(there[:60_000], there[50_000:]))
    assert math.isclose(found, wanted[number], rel_tol=1e-6)  # threads sum in parts
assert torch.equal(there.cpu(), plain)
"""
    programs.counts_of(program, tmp_path)


def test_every_layout_size_and_alias_comes_through_as_it_is(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"import sys; sys.path.append({str(ROOT)!r})\n"
    program += "from hunt.fuzz.transfers import main; sys.argv[1:] = {}; main()"
    done, counts = programs.execute(program.format(["--examples", "40"]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert counts["graph_calls"] >= 100
