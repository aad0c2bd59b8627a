"""Whole programs under `gpufaas exec`: inputs that do not lie in memory as they read."""

from pathlib import Path

from tests.kit.programs.executed_programs import ForkedPrograms

SETUP = """
import torch
from torch_shim.process_report import report

class Layered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(5000, 4))  # it stays with the worker

def asked(module, *inputs):
    with torch.no_grad():
        return module(*inputs)
"""


def run(programs: ForkedPrograms, folder: Path, program: str) -> None:
    done, counts = programs.execute(SETUP + program + '\nprint("well")\n', folder)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert counts["graph_calls"], counts
    assert not counts["local_calls"], counts


def test_call_that_writes_runs_once_though_an_output_lies_in_a_sparse_input(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
class Views(Layered):
    def forward(self, x):
        self.total += 1
        return x.view(torch.int32), self.layer(x[:, :4]) * 0 + self.total[0]

base = torch.arange(80.0).reshape(10, 8)
there = base.cuda()
views = Views().cuda()
for turn, part in enumerate((slice(0, 3), slice(0, 8, 3), slice(1, 4), slice(1, 9, 3)), 1):
    seen, total = asked(views, there[part])
    assert torch.equal(seen.cpu(), base[part].view(torch.int32))
    assert total.tolist() == [[float(turn)] * 4] * 3, turn
    assert seen.data_ptr() == there[part].data_ptr(), turn
first = Views().cuda()
seen, total = asked(first, there[::3])
assert total.tolist() == [[1.0] * 4] * 4 and first.total[4999, 3].item() == 1
assert torch.equal(seen.cpu(), base[::3].view(torch.int32))
seen.zero_()  # it is the input
assert there[::3].sum().item() == 0
"""
    run(programs, tmp_path, program)


def test_output_of_a_writing_call_lies_in_the_copy_where_its_input_had_to_be_copied(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
class Packs(Layered):
    def forward(self, x):
        x += 1
        self.total += 1
        return x.contiguous(), self.layer(x[:, :4]) * 0 + self.total[0]

packs = Packs().cuda()
base = torch.zeros(40, 8)
there = base.cuda()
for turn, step in enumerate((1, 1, 7, 7, 9, 1), 1):
    packed, total = asked(packs, there[::step])
    base[::step] += 1
    assert torch.equal(packed.cpu(), base[::step]), turn
    assert total[0].tolist() == [float(turn)] * 4
    assert torch.equal(there.cpu(), base), turn
"""
    run(programs, tmp_path, program)


def test_input_that_is_conjugated_or_negated_when_it_is_read_has_its_values(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
class Parts(Layered):
    def forward(self, x):
        return torch.view_as_real(x.resolve_conj() * 2) + self.layer.bias.sum() * 0

class Moves(Layered):
    def forward(self, x):
        x += 1
        return x * 2 + self.layer.bias.sum() * 0

parts, moves = Parts().cuda(), Moves().cuda()
for size in (3, 3000):  # a large one is kept by the worker
    numbers = torch.complex(torch.ones(size), torch.arange(float(size)))
    there = numbers.cuda()
    for turn in range(8):
        given, native = (there.conj(), numbers.conj()) if turn % 4 < 2 else (there, numbers)
        answer = asked(parts, given)
        assert torch.equal(answer.cpu(), torch.view_as_real(native.resolve_conj() * 2)), turn
    for turn in range(5):
        answer = asked(moves, there.conj().imag)
        native = numbers.conj().imag.add_(1) * 2
        assert torch.equal(answer.cpu(), native), (size, turn)
        assert torch.equal(there.cpu(), numbers), (size, turn)
"""
    run(programs, tmp_path, program)


def test_first_call_of_a_program_may_have_an_empty_input(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
class Sums(Layered):
    def forward(self, none, x):
        return self.layer(x) * 0 + none.sum() + x

sums = Sums().cuda()
for turn in range(4):
    answer = asked(sums, torch.zeros(0, 4).cuda(), torch.ones(1, 4).cuda())
    assert answer.tolist() == [[1.0] * 4]
"""
    run(programs, tmp_path, program)
