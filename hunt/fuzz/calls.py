"""Modules that draw, write, alias and keep, called again and again: all as on the CPU.

`gpufaas exec --devices cpu:1 -- python -m hunt.fuzz.calls [--modules N] [--seed N]`. Each module is
called 34 times, so that its calls are recorded, between writes of the program. Outputs, inputs,
buffers and the generator's state are compared with those of its twin on the CPU.
"""

import argparse
import copy
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._dynamo

from torch_shim.process_report import report

_CALLS = 34
_MODULES_OF_A_TRACE = 10  # then Dynamo forgets what it has compiled
_BUFFERS = ("small", "mid", "large")
_MOST_HELD = 3  # earlier answers that are compared again

Tensors = list[torch.Tensor]


class Step(NamedTuple):
    """One operation of a module: on one of its inputs, with a number."""

    does: str
    input: int
    number: int


class Drawn(torch.nn.Module):
    """A module made of random steps."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.small: torch.Tensor
        self.register_buffer("small", torch.zeros(4))
        self.register_buffer("mid", torch.zeros(40, 32))
        self.register_buffer("large", torch.zeros(5000, 4))
        self.steps = steps

    def forward(self, inputs: Tensors) -> list[Any]:
        """Return what the steps give, and their sum."""
        given: list[Any] = []
        total = self.layer(torch.ones(2, 4, device=self.small.device)) * 0 + 1.0
        for does, which, number in self.steps:
            if does in _CHANGES:
                total = _CHANGES[does](self, total, inputs[which], number)
            elif does in _WRITES:
                _WRITES[does](self, total.detach(), inputs[which], number)
            else:
                given += _GIVES[does](self, total, inputs[which], number)
        return [*given, total + 0]


_CHANGES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "layer": lambda m, total, _x, _n: total + m.layer(total) * 0.1,
    "rand": lambda _m, total, _x, _n: total + torch.rand_like(total),
    "dropout": lambda _m, total, _x, _n: torch.nn.functional.dropout(total, 0.5, True),
    "randint": lambda _m, total, _x, _n: total + torch.randint(0, 10, (2, 4), device=total.device),
    "add input": lambda _m, total, x, _n: total + x.reshape(-1)[:4],
    "add input's sum": lambda _m, total, x, _n: total + x.sum() * 0.01,
    "add buffers": lambda m, total, _x, _n: total + m.large[:2] + m.mid[:2, :4] + m.small,
}
_WRITES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor, int], object]] = {
    "write small": lambda m, total, _x, _n: m.small.add_(total[0]),
    "halve small": lambda m, _total, _x, _n: m.small.mul_(0.5),
    "write row of mid": lambda m, total, _x, n: m.mid[n].add_(1.0 + total[0, 0]),
    "write row of large": lambda m, total, _x, n: m.large[n].add_(total[0]),
    "write large": lambda m, _total, _x, _n: m.large.mul_(0.5).add_(1),
    "write input": lambda _m, _total, x, n: x.mul_(0.5).add_(n),
    "write row of input": lambda _m, _total, x, _n: x[0].add_(1),
}
_GIVES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor, int], list[Any]]] = {
    "input": lambda _m, _total, x, _n: [x],
    "view of input": lambda _m, _t, x, n: [x.view(-1)[n % 3 :] if x.is_contiguous() else x[0]],
    "input transposed": lambda _m, _total, x, _n: [x.transpose(0, -1)],
    "input as int": lambda _m, _total, x, _n: [x.view(torch.int32)],
    "small": lambda m, _total, _x, _n: [m.small],
    "rows of mid": lambda m, _total, _x, _n: [m.mid[1:3]],
    "columns of large": lambda m, _total, _x, _n: [m.large.t()[:, 3:50]],
    "twice large": lambda m, _total, _x, _n: [m.large * 2],
    "total": lambda _m, total, _x, _n: [total],
    "total transposed": lambda _m, total, _x, _n: [total.t()],
    "two of one storage": lambda _m, total, _x, _n: _two(total + 1),
    "much": lambda _m, total, _x, _n: [torch.zeros(300, 100, device=total.device) + total[0, 0]],
    "much at random": lambda _m, total, _x, _n: [torch.rand(300, 100, device=total.device)],
    "some": lambda _m, total, _x, _n: [torch.zeros(50, 100, device=total.device) + total[0, 0]],
    "gaps": lambda _m, total, _x, _n: [total.repeat(4, 4)[::2, ::3]],
    "number": lambda _m, _total, _x, n: [n],
    "nothing": lambda _m, _total, _x, _n: [None],
    "expanded": lambda _m, total, _x, _n: [total[:1].expand(5, 4)],
}
_STEPS = [*_CHANGES, *_WRITES, *_GIVES]


def _two(tensor: torch.Tensor) -> Tensors:
    return [tensor, tensor[1:]]


class _Kind(NamedTuple):
    """What inputs may be: the shape of their storage, and the views that a call takes."""

    shape: tuple[int, ...]
    views: list[Callable[[torch.Tensor], torch.Tensor]]
    writable: bool = True


_KINDS = {
    "small": _Kind(
        (10, 4),
        [
            lambda base: base[0:3],
            lambda base: base[2:5],
            lambda base: base[5:8],
            lambda base: base[0:8:3][:3],
            lambda base: base[1:4],
        ],
    ),
    "mid": _Kind(
        (90, 32), [lambda base: base[0:40], lambda base: base[7:47], lambda base: base[40:80]]
    ),
    "large": _Kind((5000, 4), [lambda base: base, lambda base: base]),
    "square": _Kind((4, 4), [lambda base: base, lambda base: base.t()]),
    "overlapping": _Kind(
        (9,),
        [lambda base: base[::4].expand(3, 3), lambda base: base[:3].expand(3, 3)],
        writable=False,
    ),
}
_BASES = 3  # of each kind; inputs of one call may share one


class _Pair(NamedTuple):
    """The same tensor, twice."""

    gpu: torch.Tensor
    cpu: torch.Tensor


class Mismatch(Exception):
    """Something is not as on the CPU. It says what, and after which call."""


class _Case:
    """One module and its 34 calls, from one number."""

    def __init__(self, number: int) -> None:
        self._chance = random.Random(number)
        inputs = self._chance.choice([1, 2, 2, 3])
        self.steps = tuple(
            Step(
                self._chance.choice(_STEPS),
                self._chance.randrange(inputs),
                self._chance.randrange(1, 6),
            )
            for _ in range(self._chance.randrange(2, 9))
        )
        writes = any(step.does in ("write input", "write row of input") for step in self.steps)
        possible = [name for name, kind in _KINDS.items() if kind.writable or not writes]
        self.kinds = [self._chance.choice(possible) for _ in range(inputs)]
        self._cpu = Drawn(self.steps).eval()
        self._gpu = copy.deepcopy(self._cpu).cuda()
        self._bases = {
            name: [self._base(name) for _ in range(_BASES)] for name in sorted(set(self.kinds))
        }
        self._usual = [
            (self._chance.randrange(_BASES), self._chance.randrange(2)) for _ in range(inputs)
        ]
        self._noise = self._chance.choice([0.05, 0.2, 0.5])
        self._looks = self._chance.choice([0.1, 0.5, 1.0])
        self._fresh = self._chance.choice([0.0, 0.3, 1.0])
        modes = [torch.no_grad] * 6 + [torch.inference_mode, torch.enable_grad]
        self._mode: Callable[[], Any] = self._chance.choice(modes)
        self._held: list[tuple[list[Any], list[Any]]] = []
        self.log: list[str] = []

    def run(self) -> None:
        """Make the calls; Mismatch where anything differs."""
        for turn in range(_CALLS):
            self._call(turn)
        self._compare_state("at the end")

    def _base(self, kind: str) -> _Pair:
        shape = torch.Size(_KINDS[kind].shape)
        plain = torch.arange(float(shape.numel())).reshape(shape) % 7 + self._chance.randrange(5)
        return _Pair(plain.cuda(), plain.clone())

    def _call(self, turn: int) -> None:
        chosen = [
            self._input(usual, kind) for usual, kind in zip(self._usual, self.kinds, strict=True)
        ]
        if self._chance.random() < self._noise:
            self._write_between(turn)
        views = [
            (_KINDS[kind].views[view], self._bases[kind][base])
            for (base, view), kind in zip(chosen, self.kinds, strict=True)
        ]
        self.log.append(f"call {turn} {chosen}")
        before = torch.get_rng_state()
        with self._mode():
            got = self._gpu([view(base.gpu) for view, base in views])
        drawn = torch.get_rng_state()
        torch.set_rng_state(before)
        with self._mode():
            expected = self._cpu([view(base.cpu) for view, base in views])
        if not torch.equal(torch.get_rng_state(), drawn):
            raise Mismatch(f"the generator's state after call {turn}")
        if self._chance.random() < self._looks:
            self._compare(got, expected, f"an output of call {turn}")
            self._compare_state(f"after call {turn}")
        if self._chance.random() < self._noise and self._mode is torch.no_grad:
            self._write_output(got, expected)
        if self._chance.random() < self._noise:
            self._held = [*self._held, (got, expected)][-_MOST_HELD:]
        if self._chance.random() < self._looks:
            self._compare_state(f"after call {turn} and a write")
            for held in self._held:
                self._compare(*held, f"an earlier output, after call {turn}")

    def _input(self, usual: tuple[int, int], kind: str) -> tuple[int, int]:
        """Which base and which view of it an input is: mostly the same in each call."""
        views = len(_KINDS[kind].views)
        other = self._chance.randrange(_BASES), self._chance.randrange(views)
        base, view = usual if self._chance.random() > self._noise else other
        if self._chance.random() < self._fresh:
            self._bases[kind][base] = self._base(kind)
        return base, view

    def _write_between(self, turn: int) -> None:
        kind = self._chance.choice(self.kinds)
        base = self._bases[kind][self._chance.randrange(_BASES)]
        how = self._chance.choice(list(_BETWEEN))
        self.log.append(f"{how} of {kind}")
        dice = torch.Generator().manual_seed(turn)
        new = torch.randn(_KINDS[kind].shape, generator=dice)
        row = torch.randn(4, generator=dice)
        with torch.no_grad():
            _BETWEEN[how](self._gpu, base.gpu, new.cuda(), row.cuda())
            _BETWEEN[how](self._cpu, base.cpu, new, row)

    def _write_output(self, got: list[Any], expected: list[Any]) -> None:
        possible = [
            number
            for number, value in enumerate(expected)
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and 0 not in value.stride()
        ]
        if possible:
            number = self._chance.choice(possible)
            self.log.append(f"write to output {number}")
            with torch.no_grad():
                got[number].add_(0.25)
                expected[number].add_(0.25)

    def _compare_state(self, when: str) -> None:
        for kind, bases in self._bases.items():
            for base in bases:
                self._compare([base.gpu], [base.cpu], f"an input of kind {kind} {when}")
        for name in _BUFFERS:
            pair = getattr(self._gpu, name), getattr(self._cpu, name)
            self._compare([pair[0]], [pair[1]], f"buffer {name} {when}")

    def _compare(self, got: list[Any], expected: list[Any], what: str) -> None:
        for one, other in zip(got, expected, strict=True):
            if not _is_same(one, other):
                raise Mismatch(f"{what}: {one} for {other}")


def _in_thread(module: Any, base: torch.Tensor, *_: torch.Tensor) -> None:
    def write() -> None:
        with torch.no_grad():
            module.mid.add_(1)
            base.sub_(1)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


def _replace_buffer(
    module: Any, _base: torch.Tensor, _new: torch.Tensor, row: torch.Tensor
) -> None:
    module.small = row


def _replace_data(_module: Any, base: torch.Tensor, new: torch.Tensor, *_: torch.Tensor) -> None:
    base.data = new


# What a program does between its calls: with its module, a base, and new values for either.
_BETWEEN: dict[str, Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "multiply an input": lambda _m, base, *_: base.mul_(1.5),
    "fill an input's data": lambda _m, base, *_: base.data.fill_(3),
    "replace an input's data": _replace_data,
    "replace an input's storage": lambda _m, base, new, _row: base.set_(new),  # type: ignore[call-overload]
    "add to a buffer": lambda module, *_: module.small.add_(1),
    "multiply rows of a buffer": lambda module, *_: module.large[2:9].mul_(3),
    "write in a thread": _in_thread,
    "change a weight": lambda module, *_: module.layer.weight.data.mul_(0.9),
    "replace a buffer": _replace_buffer,
}


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and one == other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.allclose(one.cpu().double(), other.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def check(number: int) -> str:
    """Run one case; return what was wrong, or nothing."""
    case = _Case(number)
    try:
        case.run()
    except Exception as error:  # noqa: BLE001 - whatever a call raises is a finding
        told = "" if isinstance(error, Mismatch) else "\n" + traceback.format_exc()
        steps = "; ".join(f"{step.does} ({step.input}, {step.number})" for step in case.steps)
        return f"{error}{told}\n  {steps}\n  inputs {case.kinds}; {'; '.join(case.log[-8:])}"
    return ""


def main() -> None:
    """Check many modules, under the shim; the exit status is 1 where one was wrong."""
    parser = argparse.ArgumentParser(prog="hunt.fuzz.calls", description=__doc__)
    parser.add_argument("--modules", type=int, default=160, metavar="N", help="how many (160)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="the first one (1)")
    options = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 64  # noqa: SLF001 - no public name
    wrong = 0
    for number in range(options.seed, options.seed + options.modules):
        if number % _MODULES_OF_A_TRACE == 0:
            torch._dynamo.reset()  # noqa: SLF001 - no public name
        said = check(number)
        if said:
            wrong += 1
            print(f"--seed {number} --modules 1: {said}", flush=True)
    counts = report.counts
    print(
        f"{options.modules} modules, {options.modules * _CALLS} calls at most,"
        f" {counts.recorded_calls} recorded, {wrong} modules wrong"
    )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
