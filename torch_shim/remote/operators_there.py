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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_shim.errors import BadFrame, NoWeights, RemoteFailure
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
from torch_shim.wire.shared_memory import is_lazy, tensor_over

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
# The sources of those that wait, which stay with the worker as long.
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
        if program.steps[0].operator == _OPERATORS["contiguous"]:  # a copy of some inputs
            remote_program.only_reads = False
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


class _Batch:
    """Selections that a thread has a worker make; others wait for the end of it."""

    def __init__(self) -> None:
        self.maker = threading.get_ident()
        self.ended = threading.Event()


@dataclass(slots=True, eq=False)
class _Selection:
    """A selection that waits; what its result is named by lasts as long as the result."""

    leases: ModelLeases
    source: torch.Tensor
    dimension: int
    rows: _Rows
    size: torch.Size
    mark: "weakref.ref[write_epochs.WriteMark]"
    content: tuple[int, int]
    batch: _Batch | None = None  # that it is being made in
    source_key: int = field(init=False)
    source_bytes: int = field(init=False)
    source_content: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.source_key = write_epochs.marked(self.source).key
        self.source_bytes = write_epochs.storage_of(self.source).nbytes()
        self.source_content = write_epochs.content_of(self.source)

    def gives(self, value: torch.Tensor) -> bool:
        """Whether a tensor that lies in the result is all of it, as it is."""
        is_whole = value.size() == self.size and value.dtype == self.source.dtype
        return is_whole and value.is_contiguous() and not is_lazy(value)

    def is_right(self) -> bool:
        """Whether the source is still what it was."""
        return write_epochs.content_of(self.source) == self.source_content


class _Selections:
    """Those of the process that wait, by the keys of their results, which it holds until then.

    The lock is never held while a worker is asked.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, _Selection] = {}
        self._rows: _Rows | None = None
        self.renew()

    def renew(self) -> None:
        """In a forked child: the threads that had the lock, or made some, are not there."""
        self._lock = threading.Lock()
        for selection in self._waiting.values():
            selection.batch = None

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
        key = write_epochs.marked(source).key
        if size_bytes < LEAST_BYTES or not self._has_room(key, source):
            return None
        if key in self._waiting:
            self.make(key)
            if absent_of(source) is None:
                return None
        rows = self._rows
        if rows is None or not rows.are(index):
            self._rows = rows = _Rows.of(index)
        if not rows.are_in(source.size(dimension)):
            return None
        mark = write_epochs.WriteMark()
        storage = storage_without_bytes(mark, size_bytes)
        mark.absent.leave(self, partial(run_there, leases))
        strides = [math.prod(size[place:]) for place in range(1, len(size) + 1)]
        handle = become_cuda(tensor_over(storage, source.dtype, 0, size, strides))
        alias, content = become_cuda(source.detach()), write_epochs.content_of(handle)
        whole = torch.Size(size)
        selection = _Selection(leases, alias, dimension, rows, whole, weakref.ref(mark), content)
        with self._lock:
            self._waiting[mark.key] = selection
            unmade[mark.key] = unmade[selection.source_key] = self.make
        return handle

    def joined_to(
        self, program: RemoteProgram, args: Sequence[Any], leases: ModelLeases
    ) -> JoinedCall | None:
        """Return a call that selects its inputs itself; None where they have to be made first.

        What is selected there goes on waiting: most often nobody needs it any more.
        """
        if not program.only_reads or program.random:
            return None
        chosen: list[tuple[int, _Selection]] = []
        with NoTorchFunction():
            for position, value in enumerate(args):
                mark = write_epochs.mark_of(value) if type(value) is CudaTensor else None
                selection = None if mark is None else self._waiting.get(mark.key)
                if selection is None:
                    continue
                if selection.batch or selection.leases != leases or not selection.gives(value):
                    return None
                chosen.append((position, selection))
        if not chosen:
            return None
        selections = [selection for _, selection in chosen]
        rows = _rows_of(selections)
        numbers = {id(each): number for number, each in enumerate(rows)}
        key = tuple(
            Chosen(position, selection.dimension, numbers[id(selection.rows)])
            for position, selection in chosen
        )
        joined = list(args)
        for position, selection in chosen:
            joined[position] = selection.source
        joined += [each.copy for each in rows]

        def is_right() -> bool:
            return all(selection.is_right() for selection in selections)

        return JoinedCall(_joined(program, key), joined, is_right)

    def make(self, key: int) -> None:
        """Have what waits under a key of a result or a source computed, with all of its model.

        What a worker refuses is computed here. What cannot be had now goes on waiting, and raises
        an error only if it has this key.
        """
        batch = _Batch()
        asked, taken = self._take(key, batch)
        try:
            if taken:
                self._make(taken, asked)
        finally:
            with self._lock:
                for each in taken.values():
                    each.batch = None
                needed = {each.source_key for each in self._waiting.copy().values()}
                for done in {key, *(each.source_key for each in taken.values())}:
                    if done not in needed and done not in self._waiting:
                        unmade.pop(done, None)
            batch.ended.set()

    def _take(self, key: int, batch: _Batch) -> tuple[dict[int, _Selection], dict[int, _Selection]]:
        """Return what waits under a key, and with it what waits of its model, now in this batch.

        If other threads are making some of that, wait for them first.
        """
        while True:
            with self._lock:
                asked = self._under(key)
                others = [each.batch for each in asked.values() if each.batch is not None]
                others = [other for other in others if other.maker != batch.maker]
                if not others:
                    models = [each.leases for each in asked.values() if each.batch is None]
                    taken = {
                        name: each
                        for name, each in self._waiting.copy().items()
                        if each.batch is None and each.leases in models[:1]
                    }
                    for each in taken.values():
                        each.batch = batch
                    return asked, taken
            for other in others:
                other.ended.wait()

    def _under(self, key: int) -> dict[int, _Selection]:
        return {
            name: each
            for name, each in self._waiting.copy().items()
            if key in (name, each.source_key)
        }

    def _make(self, taken: dict[int, _Selection], asked: dict[int, _Selection]) -> None:
        try:
            self._give(taken, _computed(list(taken.values())))
        except Exception:
            if len(taken) == 1:
                raise
            for key in taken.keys() & asked.keys() & self._waiting.keys():
                self._give({key: taken[key]}, _computed([taken[key]]))

    def _give(self, taken: dict[int, _Selection], results: Sequence[torch.Tensor]) -> None:
        with NoTorchFunction():
            for (key, selection), result in zip(taken.items(), results, strict=True):
                _give(selection, result)
                self._waiting.pop(key, None)
                unmade.pop(key, None)

    def _has_room(self, key: int, source: torch.Tensor) -> bool:
        """Whether one more may wait: the sources of those that do stay with the worker as long."""
        waiting = self._waiting.copy().values()
        kept = {each.source_key: each.source_bytes for each in waiting}
        kept[key] = write_epochs.storage_of(source).nbytes()
        return len(waiting) < _MOST_WAITING and sum(kept.values()) <= _MOST_WAITING_BYTES

    # -- as the holder of their results ----------------------------------------------------------

    @property
    def sole(self) -> set[int]:
        """A set for nobody: they are in `_waiting`."""
        return set()

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
        and not (is_lazy(source) or source.is_quantized)
    )


def _computed(selections: Sequence[_Selection]) -> list[torch.Tensor]:
    """The results of selections of one model, by one call; here if the worker refuses it."""
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
            return program.run_now(tensors, selections[0].leases)
    except (NoWeights, RemoteFailure) as failure:
        _note_refusal(failure)
        return [_selected_here(each) for each in selections]


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
    made, own = absent_of(result), write_epochs.marked(result)
    if made is None or write_epochs.storage_of(result).nbytes() != result.nbytes:
        if made is not None:
            made.bring()
        absent.fill(write_epochs.storage_of(result.clone()))
    else:
        absent.become(made)
        mark.key = absent.key
        if isinstance(absent.holder, WorkerPeer):
            absent.holder.kept.result(mark.key, selection.content)
    if isinstance(own.made_by, MadeBy):
        own.made_by.call.made(own.made_by.output, mark, selection.content)
