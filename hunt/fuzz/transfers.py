"""Tensors of every size, layout and alias through a worker: the same bits as plain torch gives.

`gpufaas exec --devices cpu:1 -- python -m hunt.fuzz.transfers [--examples N]`. Programs are made
by hand, without a trace, so that a call costs little more than its bytes.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from torch_shim.remote.program import RemoteProgram
from torch_shim.remote.values import NAME_OF
from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import NoTorchFunction, become_cuda
from torch_shim.wire.programs import Program, ProgramStep, Ref, Slice, Tuple
from torch_shim.wire.shared_memory import span_of

# Elements: none, one, beside multiples of 64, and beside the borders of 4 KiB, 16 KiB, 64 KiB,
# 1 MiB and 4 MiB for elements of 1, 2, 4 and 8 bytes.
_COUNTS = [0, 1, 2, 3, 63, 64, 65, 1000, 4095, 4097, 16383, 16385, 65537]
_LARGE_COUNTS = [262143, 262145, 524289, 1048577]
_MOST_CASES = 1 << 62
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_NO_ARITHMETIC = (*_FLOAT8, "bool", "uint16", "uint32", "uint64")
_CALLS = 3  # with the same tensors: they are sent, kept and referred to

Steps = list[ProgramStep]
_RUN: dict[str, Callable[..., Any]] = {
    "m:add": torch.Tensor.add,
    "m:add_": torch.Tensor.add_,
    "m:clone": torch.Tensor.clone,
    "m:contiguous": torch.Tensor.contiguous,
    "m:fill_": torch.Tensor.fill_,
    "m:flatten": torch.Tensor.flatten,
    "m:mul": torch.Tensor.mul,
    "m:t": torch.Tensor.t,
    "o:getitem": lambda value, index: value[index],
}


class _Tensors(NamedTuple):
    """The same tensors twice: plain ones, and handles."""

    plain: list[torch.Tensor]
    handles: list[torch.Tensor]


class _Case:
    """One random case, from one number."""

    def __init__(self, number: int) -> None:
        self._chance = random.Random(number)
        self._dice = torch.Generator().manual_seed(number)

    def bases(self) -> _Tensors:
        """Tensors with storages of their own."""
        plain = [self._base() for _ in range(self._chance.randint(1, 4))]
        return _Tensors(plain, [self._to_gpu(tensor) for tensor in plain])

    def views(self, bases: _Tensors) -> _Tensors:
        """Inputs of a program: views of the bases, some of them of the same one."""
        found = _Tensors([], [])
        for _ in range(self._chance.choice([1, 2, 3, 8])):
            number = self._chance.randrange(len(bases.plain))
            view = self._view(bases.plain[number])
            found.plain.append(view(bases.plain[number]))
            found.handles.append(view(bases.handles[number]))
        return found

    def program(self, inputs: list[torch.Tensor]) -> Program:
        """Steps over these inputs, of which many values are outputs, some of them twice."""
        steps: Steps = []
        for number, value in enumerate(inputs):
            for _ in range(self._chance.randint(0, 2)):
                steps.append(self._step(number, value))
        made = [Ref(number) for number in range(len(inputs) + len(steps))]
        outputs = self._chance.choices(made, k=self._chance.choice([0, 1, 2, 5, 40]))
        return Program(len(inputs), (), tuple(steps), Tuple(list(outputs)))

    def write(self, tensors: _Tensors) -> None:
        """Write to one of the tensors in both worlds, as a program does between its calls."""
        number = self._chance.randrange(len(tensors.plain))
        for found in (tensors.plain[number], tensors.handles[number]):
            if found.numel() and not _overlaps(tensors.plain[number]):
                found.view(-1)[:1].zero_() if found.is_contiguous() else found.zero_()

    def _base(self) -> torch.Tensor:
        large = self._chance.random() < 0.15
        count = self._chance.choice(_LARGE_COUNTS if large else _COUNTS)
        dtype = self._chance.choice(list(NAME_OF))
        size = count * dtype.itemsize
        if dtype is torch.bool:
            return torch.randint(2, (count,), generator=self._dice).bool()
        if dtype.is_floating_point or dtype.is_complex:
            narrow = torch.randn(count, generator=self._dice)
            return narrow.to(dtype)
        bits = torch.randint(256, (size,), generator=self._dice, dtype=torch.uint8)
        return bits.view(dtype)

    def _to_gpu(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._chance.random() < 0.5:
            return tensor.cuda()
        with NoTorchFunction():  # as what factories make: in memory that nobody shares
            return become_cuda(tensor.clone())

    def _view(self, base: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        count = base.numel()
        start = self._chance.randint(0, min(count, 70))
        rows = max(1, int(count**0.5))
        columns = count // rows
        overlapping = (max(count // 2, 1) if count > 3 else 0, 3 if count > 3 else 0)
        return self._chance.choice(
            [
                lambda tensor: tensor,
                lambda tensor: tensor[start:],
                lambda tensor: tensor[: count - start],
                lambda tensor: tensor[start::3],
                lambda tensor: tensor[: rows * columns].view(rows, columns).t(),
                lambda tensor: tensor[: rows * columns].view(rows, columns)[:, : columns // 2],
                lambda tensor: tensor[:1].expand(5, min(count, 1)),
                lambda tensor: tensor.as_strided(overlapping, (1, 1)),
            ]
        )

    def _step(self, number: int, value: torch.Tensor) -> ProgramStep:
        this = Ref(number)
        choices = [
            ProgramStep("m:clone", [this]),
            ProgramStep("m:contiguous", [this]),
            ProgramStep("m:flatten", [this]),
        ]
        if value.dim():
            begin = self._chance.randint(0, 3)
            choices.append(ProgramStep("o:getitem", [this, Slice(begin, None, None)]))
        if value.dim() == 2:
            choices.append(ProgramStep("m:t", [this]))
        writable = not _overlaps(value)
        if NAME_OF[value.dtype] not in _NO_ARITHMETIC:
            choices += [ProgramStep("m:add", [this, 1]), ProgramStep("m:mul", [this, 2])]
            choices += [ProgramStep("m:add_", [this, 1])] * (2 * writable)
        elif writable and NAME_OF[value.dtype] not in _FLOAT8:
            choices.append(ProgramStep("m:fill_", [this, 1]))
        return self._chance.choice(choices)


def check(number: int, leases: Any) -> None:
    """Run one case; AssertionError where a bit differs."""
    case = _Case(number)
    bases = case.bases()
    inputs = case.views(bases)
    program = case.program(inputs.plain)
    remote = RemoteProgram(program, len(program.steps))
    for _ in range(_CALLS):
        expected = _run(program, inputs.plain)
        with NoTorchFunction():
            got = remote.run(inputs.handles, leases)
        outputs = [become_cuda(found) if type(found) is torch.Tensor else found for found in got]
        written = _Tensors(bases.plain + expected, bases.handles + outputs)
        _compare(written)
        case.write(written)
        _compare(written)


def _run(program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    values: list[Any] = list(inputs)
    for step in program.steps:
        arguments = [_value(argument, values) for argument in step.arguments]
        values.append(_RUN[step.operator](*arguments))
    return [values[reference.number] for reference in program.output.items]


def _value(argument: Any, values: list[Any]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.number]
    if isinstance(argument, Slice):
        return slice(argument.start, argument.stop, argument.step)
    return argument


def _compare(tensors: _Tensors) -> None:
    for number, (plain, handle) in enumerate(zip(*tensors, strict=True)):
        found = handle.cpu()
        layout = (found.dtype, found.shape, handle.stride())
        assert layout == (plain.dtype, plain.shape, plain.stride()), (number, layout)
        assert torch.equal(_bits(found), _bits(plain)), f"tensor {number} differs"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1)
    return flat.view(torch.uint8)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor lie in the same place."""
    if not tensor.numel():
        return False
    whole = torch.arange(span_of(tensor.shape, tensor.stride()))
    places = whole.as_strided(tensor.shape, tensor.stride(), 0)
    return len(set(places.flatten().tolist())) < tensor.numel()


def main() -> None:
    """Check many cases, under the shim."""
    parser = argparse.ArgumentParser(prog="hunt.fuzz.transfers", description=__doc__)
    parser.add_argument("--examples", type=int, default=3000, metavar="N", help="cases (3000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which ones (0)")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    layer = torch.nn.Linear(256, 256).cuda()
    stays = layer(torch.ones(256, 256).cuda())
    leases = write_epochs.marked(stays).absent.run_there.args[0]

    @seed(options.seed)
    @settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, _MOST_CASES))
    def checks(number: int) -> None:
        check(number, leases)

    checks()


if __name__ == "__main__":
    main()
