"""The inputs of calls and bindings, and what of them a function's process leaves in the worker."""

import operator
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gpu_manager.call_errors import CallRefused
from gpu_manager.devices.worker_device import DeviceImage, Refill, WorkerDevice
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.tensor_specs import TensorSpec, identity, read_spec, view
from gpu_manager.worker.shared_memory import (
    MOST_FILE_BYTES,
    ByteBudget,
    FunctionBlocks,
    ResultFiles,
)
from torch_shim.wire.messages import FromArea, FromImage, FromKept, SentTensor
from torch_shim.wire.protocol import MOST_BINDINGS, FailureKind

_MOST_LASTING_BYTES = 1 << 20  # of inputs whose copies may stay for the next call

_version_of = operator.attrgetter("_version")  # the counter that autograd goes by

NO_AREA = memoryview(b"")


# What a function's process has left in the worker: kept storages, programs and bindings.


@dataclass(slots=True, eq=False)
class InputStorage:
    """A storage that inputs lie in, and where it comes from."""

    storage: torch.UntypedStorage
    key: int = 0  # its name among the kept ones, 0 if it is not kept
    epoch: int = 0
    image: DeviceImage | None = None  # of a model's weights that it belongs to
    place: tuple[int, int] = (0, 0)  # its offset and size in the image, else in the area
    shared: bool = False  # whether others read it too: only what writes to no input may use it
    use: object = None  # is kept as long as this: it ends the use of borrowed memory
    parked: bool = False  # whether the storage lies in host memory for now


class TensorInput(NamedTuple):
    """One tensor input: its position, the tensor as described, and the storage it lies in."""

    position: int
    tensor: torch.Tensor
    held: InputStorage
    spec: TensorSpec

    def keeps_its_shape(self) -> bool:
        """Whether the tensor still is laid out as described, whatever was written to it."""
        tensor, spec = self.tensor, self.spec
        layout = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        return layout == (spec.shape, spec.strides, spec.offset)


class KeptStorages:
    """A session's kept storages. One call at a time.

    Copies of what the function has too leave when there are too many, the least recently used
    first. Of what the function does not have, nothing leaves until the function says so.
    """

    def __init__(self, budget_bytes: int, sole_budget: ByteBudget, file_budget: ByteBudget) -> None:
        self.files = ResultFiles(file_budget)
        self.blocks = FunctionBlocks()
        self.budget_bytes = budget_bytes  # of the copies
        self._sole_budget = sole_budget
        self._copies: OrderedDict[int, InputStorage] = OrderedDict()
        self._sole: OrderedDict[int, InputStorage] = OrderedDict()
        self.size_bytes = 0  # of the copies
        self.channels = 0  # of the session that are open

    def find(self, key: int, epoch: int) -> InputStorage | None:
        """The storage of this name, if its content is that of this epoch."""
        holding = self._sole if key in self._sole else self._copies
        held = holding.get(key)
        if held is None or held.epoch != epoch:
            return None
        holding.move_to_end(key)
        return held

    def held(self, key: int, epoch: int) -> InputStorage:
        """The same; CallRefused if it is not here."""
        held = self.find(key, epoch)
        if held is None:
            raise CallRefused(FailureKind.MISSING, f"key {key}", {"missing": [key]})
        return held

    def keep(self, held: InputStorage) -> None:
        """Keep a copy under its key, at the cost of other copies if need be."""
        self.drop([held.key])
        self._copies[held.key] = held
        self.size_bytes += held.storage.nbytes()
        while self.size_bytes > self.budget_bytes and self._copies:
            self.drop([next(iter(self._copies))])

    def has_room(self, size_bytes: int) -> bool:
        return self._sole_budget.size_bytes + size_bytes <= self._sole_budget.most_bytes

    def keep_sole(self, held: InputStorage) -> None:
        self.drop([held.key])
        self._sole[held.key] = held
        self._sole_budget.size_bytes += held.storage.nbytes()

    def has_sole(self, key: int) -> bool:
        return key in self._sole

    def sole(self) -> list[InputStorage]:
        return list(self._sole.values())

    def shared(self, key: int) -> None:
        """The function has what is kept under this key too from now on."""
        held = self._sole.pop(key, None)
        if held is not None:
            self._sole_budget.size_bytes -= held.storage.nbytes()
            self.keep(held)

    def drop(self, keys: Iterable[int]) -> None:
        """Forget these, if they are here. A negative key is a file that the function gives back."""
        for key in keys:
            if key < 0:
                self.files.give(-key)
            self.blocks.drop(key)
            held = self._copies.pop(key, None)
            if held is not None:
                self.size_bytes -= held.storage.nbytes()
            held = self._sole.pop(key, None)
            if held is not None:
                self._sole_budget.size_bytes -= held.storage.nbytes()

    def clear_copies(self) -> None:
        self._copies.clear()
        self.size_bytes = 0

    def clear(self) -> None:
        self.drop([*self._copies, *self._sole])
        self.files.clear()
        self.blocks.clear()


# Each takes a thread and a descriptor of the worker; a function has one for each of its threads.
MOST_CHANNELS = 128


_COPIES_BYTES = 1 << 30  # of one session
_SOLE_BYTES = 4 << 30  # of all sessions


class SessionStorages:
    """The kept storages of every session that has a channel open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, KeptStorages] = {}
        self.budget_bytes = _COPIES_BYTES
        self.sole_budget = ByteBudget(_SOLE_BYTES)  # of what nobody else has
        self.file_budget = ByteBudget(MOST_FILE_BYTES)

    def open(self, name: str) -> KeptStorages:
        """What the session keeps, for one more channel of it."""
        with self._lock:
            kept = self._sessions.get(name)
            if kept is None:
                kept = KeptStorages(self.budget_bytes, self.sole_budget, self.file_budget)
                self._sessions[name] = kept
            kept.channels += 1
            return kept

    def has_too_many(self, name: str) -> bool:
        with self._lock:
            kept = self._sessions.get(name)
            return kept is not None and kept.channels >= MOST_CHANNELS

    def close(self, name: str) -> bool:
        """A channel is gone; return whether it was the session's last one."""
        with self._lock:
            kept = self._sessions[name]
            kept.channels -= 1
            if not kept.channels:
                del self._sessions[name]
            return not kept.channels

    def clear_copies(self) -> None:
        for kept in self._now():
            kept.clear_copies()

    def sole(self) -> list[InputStorage]:
        return [held for kept in self._now() for held in kept.sole()]

    def any_free_file(self) -> bool:
        has_files = self.file_budget.size_bytes > 0
        return has_files and any(kept.files.any_free for kept in self._now())

    def trim_files(self, before_s: float) -> None:
        for kept in self._now():
            kept.files.trim(before_s)

    def _now(self) -> list[KeptStorages]:
        with self._lock:
            return list(self._sessions.values())


class Binding:
    """Inputs of a program that stay the same, by position; `gone` once their content is not."""

    def __init__(self, number: int, given: list[TensorInput]) -> None:
        self.number = number
        self.given = given
        self.positions = positions_of(given)
        self.gone = False

    def keeps(self, key: int) -> bool:
        return any(entry.held.key == key for entry in self.given)


def positions_of(given: Iterable[TensorInput]) -> dict[int, int]:
    """By storage, the first input that lies in it."""
    positions: dict[int, int] = {}
    for entry in given:
        positions.setdefault(identity(entry.held.storage), entry.position)
    return positions


@dataclass(slots=True)
class _DefinedProgram:
    """A program that a channel has defined, and what the channel has bound and called it with."""

    program: BuiltProgram
    bindings: OrderedDict[int, Binding] = field(default_factory=OrderedDict)  # the latest
    # What a call said, its binding, and what its inputs were made of.
    prepared: tuple[Any, Binding | None, Any] | None = None


class ChannelState:
    """The numbers that one channel gave to programs and bindings, and its arena."""

    def __init__(self, kept: KeptStorages) -> None:
        self.kept = kept
        self.arena: memoryview | None = None
        self._programs: dict[int, _DefinedProgram] = {}

    def define(self, number: int, program: BuiltProgram) -> None:
        """Give a program a number; bindings of the one that had it are gone."""
        self._programs[number] = _DefinedProgram(program)

    def program(self, number: int) -> BuiltProgram:
        defined = self._programs.get(number)
        if defined is None:
            raise CallRefused(FailureKind.MISSING, f"program {number}", {"missing": []})
        return defined.program

    def bind(self, program: int, binding: Binding) -> None:
        """Remember a program's binding; the least recently used leaves if there are too many."""
        defined = self._programs[program]
        defined.bindings[binding.number] = binding
        defined.bindings.move_to_end(binding.number)
        if len(defined.bindings) > MOST_BINDINGS:
            defined.bindings.popitem(last=False)
        defined.prepared = None

    def binding(self, program: int, number: int | None) -> Binding | None:
        """The program's binding of this number; None for no number."""
        if number is None:
            return None
        bindings = self._programs[program].bindings
        binding = bindings.get(number)
        if binding is None or binding.gone:
            raise CallRefused(FailureKind.MISSING, f"binding {number}", {"missing": []})
        bindings.move_to_end(number)
        return binding

    def take_arena(self, arena: memoryview) -> None:
        """Use this memory from now on; nothing lies in the former one any more."""
        self.arena = arena
        for defined in self._programs.values():
            defined.prepared = None

    def close(self) -> None:
        self.arena = None
        self._programs.clear()

    def prepared(self, program: int, described: Any, binding: Binding | None) -> Any:
        prepared = self._programs[program].prepared
        if prepared is None or prepared[1] is not binding or prepared[0] != described:
            return None
        return prepared[2]

    def prepare(self, program: int, described: Any, binding: Binding | None, inputs: Any) -> None:
        """Remember what the inputs of a call are made of, for the next one that says the same."""
        self._programs[program].prepared = described, binding, inputs

    def forget_prepared(self, program: int) -> None:
        defined = self._programs.get(program)
        if defined is not None:
            defined.prepared = None


class Inputs:
    """Everything a program gets in one call."""

    def __init__(self, values: list[Any], sent: list[TensorInput], binding: Binding | None) -> None:
        self.values = values
        self.sent = sent
        self.given = sent if binding is None else sent + binding.given
        self.positions = [positions_of(sent)]
        if binding is not None:
            self.positions.append(binding.positions)
        self.shapes = tuple(entry.tensor.shape for entry in sent)
        self.batch = _batch(sent)
        self.end_bytes = 0  # of the area, behind the last byte that an input takes
        self.refill: Refill | None = None  # set if the next call may have the same tensors
        self._received = {entry.held for entry in sent if entry.held.image is None}
        self._tensors = [entry.tensor for entry in self.given]
        self._versions = self._now()

    @property
    def received_bytes(self) -> int:
        return sum(entry.tensor.nbytes for entry in self.sent if entry.held.image is None)

    def refilled(self, area: memoryview) -> "Inputs":
        """The same tensors for another call, with what is in the area now."""
        assert self.refill is not None, "such inputs do not last"
        for held in self._received:
            self.refill(held.storage, area, *held.place)
        self._versions = self._now()
        return self

    def changed(self) -> list[TensorInput]:
        after = self._now()
        if after == self._versions:
            return []
        pairs = zip(self.given, self._versions, after, strict=True)
        return [entry for entry, before, now in pairs if before != now]

    def note_restored(self) -> None:
        """What was written to them was taken back; nobody takes back what is an image's."""
        now = zip(self.given, self._versions, self._now(), strict=True)
        self._versions = [new if entry.held.image is None else old for entry, old, new in now]

    def refuse_if_written(self) -> None:
        """CallRefused where a program has written to some, and ended before it was done."""
        if self.changed():
            detail = "inputs were written to when memory ran out; send them again"
            raise CallRefused(FailureKind.MISSING, detail, {"missing": []})

    def _now(self) -> list[int]:
        return list(map(_version_of, self._tensors))


def _batch(sent: list[TensorInput]) -> int:
    """The first dimension of the largest input that is no weight, 0 where there is none."""
    tensors = (entry.tensor for entry in sent if entry.held.image is None)
    largest = max(tensors, key=torch.Tensor.numel, default=None)
    return 0 if largest is None or not largest.dim() else largest.size(0)


class InputReader:
    """Reads descriptions of tensors; equal sources become one storage."""

    def __init__(
        self,
        device: WorkerDevice,
        images: dict[str, DeviceImage],
        kept: KeptStorages,
        area: memoryview = NO_AREA,
        *,
        borrows: bool = False,
        reads_only: bool = False,
    ) -> None:
        """A program that writes to an input, or may do so, is not one that `reads_only`."""
        self._device = device
        self._images = images
        self._kept = kept
        self._area = area
        self._borrows = borrows
        self._reads_only = reads_only
        self._held: dict[tuple[int, ...], InputStorage] = {}
        self._missing: list[int] = []
        self._end_bytes = 0
        self._lasting = True

    def call(self, described: list[Any], count: int, binding: Binding | None) -> Inputs:
        if len(described) != count:
            raise CallRefused(FailureKind.BAD_FRAME, f"the program takes {count} inputs")
        values: list[Any] = [None] * count
        given = []
        for position, entry in enumerate(described):
            if isinstance(entry, SentTensor):
                tensor = self._tensor(position, entry)
                if tensor is not None:
                    given.append(tensor)
                    values[position] = tensor.tensor
            elif isinstance(entry, (bool, int, float)):
                values[position] = entry
                self._lasting = False  # 1, 1.0 and True are equal and not the same
            elif entry is None:
                continue
            else:
                raise CallRefused(FailureKind.BAD_FRAME, f"input {position} is {entry!r:.80}")
        self._check_missing()
        for entry in binding.given if binding is not None else ():
            if described[entry.position] is not None:
                raise CallRefused(FailureKind.BAD_FRAME, f"input {entry.position} is bound")
            values[entry.position] = entry.tensor
        inputs = Inputs(values, given, binding)
        inputs.end_bytes = self._end_bytes
        if self._lasting and self._end_bytes <= _MOST_LASTING_BYTES:
            inputs.refill = self._device.refill
        return inputs

    def binding(self, number: int, described: dict[int, SentTensor], count: int) -> Binding:
        given = []
        for position, entry in sorted(described.items()):
            if not 0 <= position < count:
                raise CallRefused(FailureKind.BAD_FRAME, f"no input {position}")
            tensor = self._tensor(position, entry)
            if tensor is not None:
                given.append(tensor)
        self._check_missing()
        return Binding(number, given)

    def _check_missing(self) -> None:
        if self._missing:
            detail = f"{len(self._missing)} kept storages"
            raise CallRefused(FailureKind.MISSING, detail, {"missing": self._missing})

    def _tensor(self, position: int, sent: SentTensor) -> TensorInput | None:
        spec = read_spec(sent.dtype, sent.shape, sent.strides, sent.offset)
        held = self._source(sent.source)
        return None if held is None else TensorInput(position, view(held.storage, spec), held, spec)

    def _source(self, source: FromImage | FromKept | FromArea) -> InputStorage | None:
        if isinstance(source, FromImage):
            return self._weights(source)
        if isinstance(source, FromKept):
            return self._from_kept(source)
        if not source.block:
            return self._sent(self._area, source)
        block = self._kept.blocks.get(source.block)
        if block is None:
            raise CallRefused(FailureKind.BAD_FRAME, f"no block {source.block}")
        self._lasting = False
        return self._sent(block.memory, source)

    def _from_kept(self, source: FromKept) -> InputStorage | None:
        self._lasting = False
        held = self._kept.find(source.key, source.epoch)
        if held is None:
            self._missing.append(source.key)
            return None
        if held.parked:
            held.storage, held.parked = self._device.unpark(held.storage), False
            held.shared = False  # it is a copy
        elif held.shared and not self._reads_only:
            held.storage, held.shared = self._device.duplicate(held.storage), False
            held.use = None
        return held

    def _weights(self, source: FromImage) -> InputStorage:
        image, place = self._images.get(source.digest), (source.offset, source.size_bytes)
        if image is None:
            detail = f"no image {source.digest!r:.80} in this worker"
            raise CallRefused(FailureKind.UNKNOWN_MODEL, detail)
        storage = image.storage(*place)
        if storage is None:
            detail = f"no storage of {source.size_bytes} bytes at {source.offset}"
            raise CallRefused(FailureKind.BAD_FRAME, detail)
        held = self._held.get((id(image), source.offset))
        if held is None:
            held = InputStorage(storage, image=image, place=place)
            self._held[id(image), source.offset] = held
        return held

    def _sent(self, area: memoryview, source: FromArea) -> InputStorage:
        offset, size_bytes, key = source.offset, source.size_bytes, source.key
        if offset + size_bytes > len(area):
            raise CallRefused(FailureKind.BAD_FRAME, f"{size_bytes} bytes at {offset} of the area")
        place = source.block, offset, size_bytes, key
        held = self._held.get(place)
        if held is None:
            borrows = self._borrows and not key and size_bytes > _MOST_LASTING_BYTES
            take = self._device.borrow if borrows else self._device.receive
            storage = take(area, offset, size_bytes)
            held = InputStorage(storage, key, source.epoch, place=(offset, size_bytes))
            self._held[place] = held
            if not source.block:
                self._end_bytes = max(self._end_bytes, offset + size_bytes)
            if key:
                self._lasting = False
                self._kept.keep(held)
        return held
