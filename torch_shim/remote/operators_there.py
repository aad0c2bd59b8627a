"""Operators that run on the worker between graphs, because only the worker has their input.

Beam search selects rows of a cache after every step, for example: without this, the whole cache
would come back each time. It does so for each tensor of each layer; such selections wait. The next
call takes them along if it only reads their results; else they run as one call before it, or when
somebody looks at one of their inputs or results.
"""

import math
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_shim.errors import (
    BadFrame,
    GpuUnavailable,
    ManagerUnreachable,
    NoWeights,
    QuotaUsedUp,
    RemoteFailure,
)
from torch_shim.leases.leasing import ModelLeases
from torch_shim.process_report import report
from torch_shim.raised_failures import error_of
from torch_shim.remote import program as programs
from torch_shim.remote.program import JoinedCall, RemoteProgram
from torch_shim.remote.recomputation import MadeBy
from torch_shim.remote.values import LEAST_BYTES
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import (
    AbsentBytes,
    absent_of,
    storage_without_bytes,
    unmade,
)
from torch_shim.tensors.dispatch import Operator
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, become_cuda
from torch_shim.wire.manager_session import Fetched, WorkerPeer
from torch_shim.wire.programs import (
    Ellipse,
    Named,
    Program,
    ProgramStep,
    Ref,
    Slice,
    Tuple,
    renumbered,
    renumbered_step,
    unpack,
)
from torch_shim.wire.protocol import FailureKind
from torch_shim.wire.shared_memory import tensor_over

# What moves rows of a tensor, by the names of functions and methods, as programs name it.
_OPERATORS = {
    "__getitem__": "o:getitem",
    "cat": "t:torch.cat",
    "clone": "m:clone",
    "concat": "t:torch.cat",
    "contiguous": "m:contiguous",
    "gather": "m:gather",
    "index_select": "m:index_select",
    "repeat": "m:repeat",
    "repeat_interleave": "m:repeat_interleave",
}
_MOST_PROGRAMS = 256  # that are remembered; one differs by its numbers, such as a slice's end
_NUMBERS = (bool, int, float, str, type(None))

_SELECTS = "index_select"
_MOST_ROWS = 1024  # of a selection that waits
_MOST_WAITING = 256
_MOST_JOINED = 8  # programs that select inputs of one program
# A worker has the inputs of those that wait as well as their results, once they are made.
_MOST_WAITING_BYTES = 64 << 20

_known: dict[bytes, RemoteProgram] = {}


class _Unsuitable(Exception):
    """An argument that a program cannot express, or that is not on the GPU."""


def install() -> None:
    """Have operators on outputs that stay with a worker run there."""
    programs.operators_there.append(lambda leases: partial(run_there, leases))
    programs.joined_calls.append(_selections.joined_to)


def run_there(leases: ModelLeases, func: Operator, args: Sequence[Any], kwargs: Any) -> Any:
    """Return a handle to an operator's result on the worker; None if it has to run here."""
    name = _OPERATORS.get(getattr(func, "__name__", ""))
    if name is None:
        return None
    tensors: list[torch.Tensor] = []
    try:
        arguments = [_argument(value, tensors) for value in args]
        named = {key: _argument(value, tensors) for key, value in (kwargs or {}).items()}
    except _Unsuitable:
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if name == _OPERATORS[_SELECTS] and not named:
        with NoTorchFunction():
            waits = _selections.add(leases, args)
        if waits is not None:
            return waits
    shifted = len(tensors)
    step = ProgramStep(name, arguments, named)
    program = _program(Program(shifted, (), (step,), Tuple([Ref(shifted)])))
    try:
        with NoTorchFunction():
            (result,) = program.run(tensors, leases)
    except (NoWeights, RemoteFailure) as failure:
        _note_refusal(failure)
        return None
    return become_cuda(result)


def _note_refusal(failure: NoWeights | RemoteFailure) -> None:
    """Tell that an operator runs here; raise what is no refusal."""
    if isinstance(failure, NoWeights):  # the model is gone, and its node has lost the weights
        return
    if failure.failure == FailureKind.LOST:
        raise error_of(failure) from failure
    report.local_call(f"{failure.failure}: {failure.message}"[:200], 1, "an operator")


def _program(program: Program) -> RemoteProgram:
    packed = program.pack()
    remote_program = _known.get(packed)
    if remote_program is None:
        if len(_known) >= _MOST_PROGRAMS:
            _known.clear()
        remote_program = _known.setdefault(packed, RemoteProgram(program, len(program.steps)))
    return remote_program


def _argument(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return an argument as programs have it; add its tensors to the program's inputs."""
    of_class = isinstance(value, CudaTensor) and not isinstance(value, torch.nn.Parameter)
    if of_class and value.layout is torch.strided:
        tensors.append(value)
        return Ref(len(tensors) - 1)
    if type(value) in _NUMBERS:
        return value
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return Slice(*(_argument(part, tensors) for part in parts))
    if isinstance(value, list):
        return [_argument(item, tensors) for item in value]
    if isinstance(value, tuple):
        return Tuple([_argument(item, tensors) for item in value])
    if isinstance(value, torch.memory_format):
        return Named("memory_format", str(value).removeprefix("torch."))
    if value is ...:
        return Ellipse()
    raise _Unsuitable


# Selections that wait.


class _Rows(NamedTuple):
    """A copy of an index, for the selections by it: it may be written to before they run."""

    original: "weakref.ref[torch.Tensor]"
    content: tuple[int, int]
    copy: torch.Tensor
    least: int
    most: int

    def are(self, index: torch.Tensor) -> bool:
        return self.original() is index and self.content == write_epochs.content_of(index)

    def are_in(self, size: int) -> bool:
        return self.least >= 0 and self.most < size

    @classmethod
    def of(cls, index: torch.Tensor) -> "_Rows":
        numbers = index.tolist()
        copy = become_cuda(index.detach().clone())
        content = write_epochs.content_of(index)
        return cls(weakref.ref(index), content, copy, min(numbers), max(numbers))


class _Selection(NamedTuple):
    """A selection that waits; what its result is named by lasts as long as the result."""

    source: torch.Tensor
    dimension: int
    rows: _Rows
    size: torch.Size
    mark: "weakref.ref[write_epochs.WriteMark]"
    content: tuple[int, int]

    def gives(self, value: torch.Tensor) -> bool:
        """Whether a tensor that lies in the result is all of it, as it is."""
        is_whole = value.size() == self.size and value.dtype == self.source.dtype
        return is_whole and value.is_contiguous() and not (value.is_conj() or value.is_neg())


class _Selections:
    """Those of the process that wait, by the keys of their results, which it holds until then."""

    def __init__(self) -> None:
        self.sole: set[int] = set()
        self._waiting: dict[int, _Selection] = {}
        self._bytes = 0
        self._leases: ModelLeases | None = None
        self._rows: _Rows | None = None
        self._making = False  # now, and all of them: it needs calls, which ask for it too
        self.renew()

    def renew(self) -> None:
        """In a forked child: the thread that had the lock is not there."""
        self._lock = threading.RLock()

    def add(self, leases: ModelLeases, args: Sequence[Any]) -> torch.Tensor | None:
        """Return a handle to the result of a selection that waits; None if it does not wait."""
        if len(args) != len(("source", "dimension", "index")):
            return None
        source, dimension, index = args
        if type(dimension) is not int or not _may_wait(source, dimension, index):
            return None
        size = list(source.size())
        size[dimension] = index.numel()
        size_bytes = torch.Size(size).numel() * source.element_size()
        if not LEAST_BYTES <= size_bytes <= _MOST_WAITING_BYTES:
            return None
        with self._lock:
            if write_epochs.marked(source).key in self._waiting:
                self.make()
                if absent_of(source) is None:
                    return None
            rows = self._rows
            if rows is None or not rows.are(index):
                rows = _Rows.of(index)
            if not rows.are_in(source.size(dimension)):
                return None
            if (
                leases != self._leases
                or len(self._waiting) >= _MOST_WAITING
                or self._bytes + size_bytes > _MOST_WAITING_BYTES
            ):
                self.make()
            mark = write_epochs.WriteMark()
            handle = self._handle(mark, source.dtype, size, size_bytes, leases)
            self._waiting[mark.key] = _Selection(
                become_cuda(source.detach()),
                dimension,
                rows,
                torch.Size(size),
                weakref.ref(mark),
                write_epochs.content_of(handle),
            )
            unmade[mark.key] = unmade[write_epochs.marked(source).key] = self.make
            self._leases, self._rows = leases, rows
            self._bytes += size_bytes
            return handle

    def _handle(
        self,
        mark: write_epochs.WriteMark,
        dtype: torch.dtype,
        size: Sequence[int],
        size_bytes: int,
        leases: ModelLeases,
    ) -> torch.Tensor:
        storage = storage_without_bytes(mark, size_bytes)
        mark.absent.leave(self, partial(run_there, leases))
        strides = [math.prod(size[place:]) for place in range(1, len(size) + 1)]
        return become_cuda(tensor_over(storage, dtype, 0, size, strides))

    def joined_to(
        self, program: RemoteProgram, args: Sequence[Any], leases: ModelLeases
    ) -> JoinedCall | None:
        """Return a call that selects its inputs itself; None where they have to be made first.

        What is selected there goes on waiting: most often nobody needs it any more.
        """
        if not program.only_reads or leases != self._leases:  # another model's worker
            return None
        chosen: list[tuple[int, _Selection]] = []
        with NoTorchFunction(), self._lock:
            for position, value in enumerate(args):
                mark = write_epochs.mark_of(value) if type(value) is CudaTensor else None
                selection = None if mark is None else self._waiting.get(mark.key)
                if selection is None:
                    continue
                if not selection.gives(value):
                    return None
                chosen.append((position, selection))
        if not chosen:
            return None
        rows = _rows_of([selection for _, selection in chosen])
        numbers = {id(each): number for number, each in enumerate(rows)}
        key = tuple(
            Chosen(position, selection.dimension, numbers[id(selection.rows)])
            for position, selection in chosen
        )
        joined = list(args)
        for position, selection in chosen:
            joined[position] = selection.source
        return JoinedCall(_joined(program, key), [*joined, *(each.copy for each in rows)])

    def make(self) -> None:
        """Have a worker compute all that wait; what it refuses is computed here."""
        with self._lock:
            if self._making:
                return
            waiting, self._waiting, self._bytes = self._waiting, {}, 0
            leases, self._leases, self._rows = self._leases, None, None
            self._making = True
            try:
                if waiting and leases is not None:
                    _compute(list(waiting.values()), leases)
            except (ManagerUnreachable, QuotaUsedUp, GpuUnavailable, KeyboardInterrupt):
                self._waiting, self._leases = waiting, leases  # another time
                raise
            finally:
                self._making = False
                if not self._waiting:
                    unmade.clear()

    # -- as the holder of their results ----------------------------------------------------------

    def drop(self, key: int) -> None:
        """Note that nobody needs a result that waits; safe in a finalizer."""
        self._waiting.pop(key, None)

    def is_with(self, _: Any) -> bool:
        return False

    def channel_for(self, _: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def fetch(self, key: int, _: Any) -> Fetched:
        raise RemoteFailure(FailureKind.LOST, "a selection that failed", {"key": key})


_selections = _Selections()
os.register_at_fork(after_in_child=_selections.renew)


def _may_wait(source: torch.Tensor, dimension: int, index: torch.Tensor) -> bool:
    return (
        isinstance(index, CudaTensor)
        and index.dim() == 1
        and index.dtype in (torch.int32, torch.int64)
        and 0 < index.numel() <= _MOST_ROWS
        and -source.dim() <= dimension < source.dim()
        and absent_of(source) is not None
        and absent_of(index) is None
        and not (source.is_conj() or source.is_neg() or source.is_quantized)
    )


def _compute(selections: Sequence[_Selection], leases: ModelLeases) -> None:
    """Compute selections as one call, and give the results to those who wait for them."""
    rows = _rows_of(selections)
    places = {id(each): len(selections) + number for number, each in enumerate(rows)}
    tensors = [each.source for each in selections] + [each.copy for each in rows]
    steps = [
        _selecting(number, each.dimension, places[id(each.rows)])
        for number, each in enumerate(selections)
    ]
    outputs = Tuple([Ref(len(tensors) + number) for number in range(len(steps))])
    program = _program(Program(len(tensors), (), tuple(steps), outputs))
    try:
        with NoTorchFunction():
            results = program.run_now(tensors, leases)
    except (NoWeights, RemoteFailure) as failure:
        _note_refusal(failure)
        results = [_selected_here(each) for each in selections]
    with NoTorchFunction():
        for selection, result in zip(selections, results, strict=True):
            _give(selection, result)


def _rows_of(selections: Sequence[_Selection]) -> list[_Rows]:
    return list({id(each.rows): each.rows for each in selections}.values())


def _selecting(source: int, dimension: int, rows: int) -> ProgramStep:
    return ProgramStep(_OPERATORS[_SELECTS], [Ref(source), dimension, Ref(rows)])


class Chosen(NamedTuple):
    """An input of a program that is selected: from what stands in its place, by numbered rows."""

    position: int
    dimension: int
    rows: int


# Of each program, by the inputs that are selected.
_joined_programs: "weakref.WeakKeyDictionary[RemoteProgram, dict[Any, RemoteProgram]]"
_joined_programs = weakref.WeakKeyDictionary()


def _joined(program: RemoteProgram, chosen: tuple[Chosen, ...]) -> RemoteProgram:
    """Return the program that selects these inputs, and then does the work of this one."""
    known = _joined_programs.setdefault(program, {})
    joined = known.get(chosen)
    if joined is None:
        if len(known) >= _MOST_JOINED:
            known.clear()
        whole = with_selections(unpack(program.packed), chosen)
        joined = known.setdefault(chosen, RemoteProgram(whole, program.operators + len(chosen)))
    return joined


def with_selections(program: Program, chosen: Sequence[Chosen]) -> Program:
    """Return a program with one input more for each number of rows, behind the others."""
    rows = 1 + max(each.rows for each in chosen)
    constants = program.inputs + len(program.constants)
    first = constants + rows
    selected = {each.position: first + number for number, each in enumerate(chosen)}
    numbers = {number: selected.get(number, number) for number in range(program.inputs)}
    numbers |= {number: number + rows for number in range(program.inputs, constants)}
    numbers |= {
        constants + place: first + len(chosen) + place for place in range(len(program.steps))
    }
    steps = [
        _selecting(each.position, each.dimension, program.inputs + each.rows) for each in chosen
    ]
    steps += [renumbered_step(step, numbers) for step in program.steps]
    return replace(
        program,
        inputs=program.inputs + rows,
        steps=tuple(steps),
        output=renumbered(program.output, numbers),
    )


def _selected_here(selection: _Selection) -> torch.Tensor:
    lacks = absent_of(selection.source)
    if lacks is not None:
        lacks.bring()
    with NoTorchFunction(), torch.no_grad():
        source, rows = selection.source, selection.rows.copy
        return torch.index_select(source, selection.dimension, rows)


def _give(selection: _Selection, result: torch.Tensor) -> None:
    """Have the handle of a selection be its result, which nobody else has."""
    mark = selection.mark()
    absent: AbsentBytes | None = None if mark is None else mark.absent
    if mark is None or absent is None:
        return
    if not selection.gives(result):
        raise BadFrame(f"{result.dtype}, {result.size()} were selected")
    made = absent_of(result)
    if made is None or write_epochs.storage_of(result).nbytes() != result.nbytes:
        if made is not None:
            made.bring()
        absent.fill(write_epochs.storage_of(result.clone()))
        return
    own = write_epochs.marked(result)
    absent.become(made)
    mark.key = absent.key
    if isinstance(absent.holder, WorkerPeer):
        absent.holder.kept.result(mark.key, selection.content)
    if isinstance(own.made_by, MadeBy):
        own.made_by.call.made(own.made_by.output, mark, selection.content)
