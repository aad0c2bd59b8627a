"""What operators read, write and compute, and the 13 metrics of a model, summed up over its runs.

On an emulated GPU the processor's time and the operators' counts stand for what a GPU's counters
say; docs/decisions/0047-neighbours.md has the list. The node replaces what its GPU measures.
"""

import math
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from gpu_manager.worker.program.argument_checks import short_name

# The first report is due after so many runs, each further one after this many times as many.
_FIRST_RUNS, _TIMES_AS_MANY = 4, 4
# A report is worth sending where some metric has changed by more than this part of it.
_NEWS = 0.2
_LEAST = 1e-9


# An operator whose tensors take more than this leaves nothing of them in a cache.
_CACHE_BYTES = 1 << 20

# Whether it is one of vmap's or grad's, which has no memory of its own.
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - torch's own has no other name

Run = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]


@dataclass(slots=True)
class OperatorCounts:
    """Sums over the operators of one run; what only looks at memory in another way moves none.

    `far_bytes` are those of operators that are too large for a cache. `arithmetic` counts a
    multiplication and an addition as two, and of other operators each number that they give.
    """

    operators: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    far_bytes: int = 0
    arithmetic: int = 0

    def add(self, name: str, arguments: Sequence[Any], given: Any) -> None:
        read = _tensors(arguments)
        written = _tensors(given if isinstance(given, (list, tuple)) else (given,))
        if not written:
            return
        self.operators += 1
        places = {tensor.untyped_storage().data_ptr() for tensor in read}
        fresh = [one for one in written if one.untyped_storage().data_ptr() not in places]
        if not fresh and not name.endswith("_"):
            return
        read_bytes = sum(tensor.nbytes for tensor in read)
        written_bytes = sum(tensor.nbytes for tensor in fresh or written)
        self.read_bytes += read_bytes
        self.written_bytes += written_bytes
        if read_bytes + written_bytes > _CACHE_BYTES:
            self.far_bytes += read_bytes + written_bytes
        self.arithmetic += _arithmetic(name, read, written[0])


def counting(run: Run, operators: Mapping[str, str], counts: OperatorCounts) -> Run:
    """The same function, with its operators counted; these are some of the names in its globals."""
    assert isinstance(run, FunctionType)
    space = dict(run.__globals__)
    for name, operator in operators.items():
        space[name] = _counted(space[name], short_name(operator), counts)
    counted: Run = FunctionType(run.__code__, space)
    return counted


def _counted(call: Callable[..., Any], name: str, counts: OperatorCounts) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        given = call(*arguments, **named)
        counts.add(name, arguments, given)
        return given

    return run


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return [tensor for tensor in found if not _is_wrapped(tensor)]


def _arithmetic(name: str, read: Sequence[torch.Tensor], given: torch.Tensor) -> int:
    """By the shapes; of convolutions and products what they sum up for each number they give."""
    numbers = given.numel()
    if len(read) < 2:  # noqa: PLR2004 - two factors
        return numbers
    if name.startswith("conv"):
        return 2 * numbers * math.prod(read[1].shape[1:])
    if name == "scaled_dot_product_attention" and read[1].dim() > 1:
        return 4 * read[0].numel() * read[1].shape[-2]
    inner = {"linear": 1, "matmul": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}.get(name)
    if inner is None or not read[inner].dim():
        return numbers
    return 2 * numbers * int(read[inner].shape[-1])


class ModelUsage:
    """Counts the runs of one model, whoever has its turn. A run adds a few numbers."""

    def __init__(self, *, emulated: bool) -> None:
        self._emulated = emulated
        self._runs = 0
        self._due = _FIRST_RUNS
        self._wall_s = self._computed_s = self._user_s = self._system_s = 0.0
        self._in_bytes = self._out_bytes = 0
        self._sums = OperatorCounts()
        self._told: list[float] = []

    @staticmethod
    def begin() -> tuple[float, float]:
        """A run begins: the seconds that the process, and the system for it, had used before.

        Other models of the process count too.
        """
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime, used.ru_stime

    def ran(
        self,
        begun: tuple[float, float],
        counts: OperatorCounts | None,
        times: tuple[float, float],
        moved: tuple[int, int],
    ) -> None:
        """A run computed for some seconds and took some; so much came to it and went from it.

        A run whose operators were not counted is left out.
        """
        if counts is None or not counts.operators:
            return
        (user_from_s, system_from_s), (user_s, system_s) = begun, self.begin()
        computed_s, wall_s = times
        self._runs += 1
        self._computed_s += computed_s
        self._wall_s += wall_s
        self._user_s += user_s - user_from_s
        self._system_s += system_s - system_from_s
        self._in_bytes += moved[0]
        self._out_bytes += moved[1]
        sums = self._sums
        sums.operators += counts.operators
        sums.read_bytes += counts.read_bytes
        sums.written_bytes += counts.written_bytes
        sums.far_bytes += counts.far_bytes
        sums.arithmetic += counts.arithmetic

    def news(self, peak_bytes: int, held_bytes: int) -> list[float]:
        """The metrics, if a report is due and they have changed; else nothing."""
        if self._runs < self._due:
            return []
        self._due *= _TIMES_AS_MANY
        found = self._metrics(peak_bytes, held_bytes)
        if self._told and not _differ(self._told, found):
            return []
        self._told = found
        return found

    def _metrics(self, peak_bytes: int, held_bytes: int) -> list[float]:
        wall_s, sums = max(self._wall_s, _LEAST), self._sums
        processor_s = self._user_s + self._system_s
        busy = user = 0.0
        arithmetic_s = wall_s
        if self._emulated:
            busy = min(1.0, processor_s / (wall_s * len(os.sched_getaffinity(0))))
            user = self._user_s / max(processor_s, _LEAST)
            arithmetic_s = max(processor_s, _LEAST)
        moved_bytes = sums.read_bytes + sums.written_bytes
        return [
            min(1.0, self._computed_s / wall_s),
            busy,
            user,
            sums.arithmetic / arithmetic_s,
            sums.operators / wall_s,
            float(peak_bytes),
            float(held_bytes),
            sums.far_bytes / max(1, moved_bytes),
            self._out_bytes / wall_s,
            self._in_bytes / wall_s,
            sums.read_bytes / wall_s,
            sums.written_bytes / wall_s,
            wall_s / self._runs,
        ]


def _differ(before: Sequence[float], now: Sequence[float]) -> bool:
    return any(
        abs(new - old) > _NEWS * max(old, _LEAST) for old, new in zip(before, now, strict=True)
    )
