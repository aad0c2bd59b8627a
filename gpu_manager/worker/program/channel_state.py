"""What a function's process has left in the worker: kept storages, programs and bindings."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from gpu_manager.worker.call_errors import CallRefused
from gpu_manager.worker.device.device_image import DeviceImage
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.tensor_specs import TensorSpec, identity
from torch_shim.wire.protocol import FailureKind


class InputStorage:
    """A storage that inputs lie in, and where it comes from.

    `key` is its name among the kept ones, 0 if it is not kept. `place` is the offset and the size
    in the `image` of a model's weights, or in the area if there is no image.
    """

    __slots__ = ("epoch", "image", "key", "place", "storage")

    def __init__(
        self,
        storage: torch.UntypedStorage,
        key: int = 0,
        epoch: int = 0,
        image: DeviceImage | None = None,
        place: tuple[int, int] = (0, 0),
    ) -> None:
        self.storage = storage
        self.key = key
        self.epoch = epoch
        self.image = image
        self.place = place


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
    """A session's kept storages, the least recently used of which leave first."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._held: OrderedDict[int, InputStorage] = OrderedDict()
        self.size_bytes = 0
        self.channels = 0  # of the session that are open

    def find(self, key: int, epoch: int) -> InputStorage | None:
        """The storage of this name, if its content is that of this epoch."""
        held = self._held.get(key)
        if held is None or held.epoch != epoch:
            return None
        self._held.move_to_end(key)
        return held

    def keep(self, held: InputStorage) -> None:
        """Keep a storage under its key, at the cost of others if need be."""
        self.drop([held.key])
        self._held[held.key] = held
        self.size_bytes += held.storage.nbytes()
        while self.size_bytes > self._budget_bytes and self._held:
            self.drop([next(iter(self._held))])

    def drop(self, keys: Iterable[int]) -> None:
        """Forget these, if they are here."""
        for key in keys:
            held = self._held.pop(key, None)
            if held is not None:
                self.size_bytes -= held.storage.nbytes()

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
        self.size_bytes = 0


# Each takes a thread and a descriptor of the worker; a function has one for each of its threads.
MOST_CHANNELS = 128


class SessionStorages:
    """The kept storages of every session that has a channel open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, KeptStorages] = {}
        self.budget_bytes = 1 << 30  # of one session

    def open(self, name: str) -> KeptStorages:
        """What the session keeps, for one more channel of it."""
        with self._lock:
            kept = self._sessions.get(name)
            if kept is None:
                kept = self._sessions[name] = KeptStorages(self.budget_bytes)
            kept.channels += 1
            return kept

    def has_too_many(self, name: str) -> bool:
        """Whether the session has as many channels as it may have."""
        with self._lock:
            kept = self._sessions.get(name)
            return kept is not None and kept.channels >= MOST_CHANNELS

    def close(self, name: str) -> None:
        """A channel is gone; with the last one goes what the session kept."""
        with self._lock:
            kept = self._sessions[name]
            kept.channels -= 1
            if not kept.channels:
                del self._sessions[name]

    def clear(self) -> None:
        """Forget everything kept, in any session."""
        with self._lock:
            for kept in self._sessions.values():
                kept.clear()


class Binding:
    """Inputs of a program that stay the same, by position; `gone` once their content is not."""

    def __init__(self, number: int, given: list[TensorInput]) -> None:
        self.number = number
        self.given = given
        self.positions = positions_of(given)
        self.gone = False

    def keeps(self, key: int) -> bool:
        """Whether one of the inputs is the kept storage of this name."""
        return any(entry.held.key == key for entry in self.given)


def positions_of(given: Iterable[TensorInput]) -> dict[int, int]:
    """By storage, the first input that lies in it."""
    found: dict[int, int] = {}
    for entry in given:
        found.setdefault(identity(entry.held.storage), entry.position)
    return found


class ChannelState:
    """The numbers that one channel gave to programs and bindings, and its arena."""

    def __init__(self, kept: KeptStorages) -> None:
        self.kept = kept
        self.arena: memoryview | None = None
        self._programs: dict[int, BuiltProgram] = {}
        self._bindings: dict[int, Binding] = {}  # the latest of each program
        self._prepared: dict[int, tuple[Any, Binding | None, Any]] = {}

    def define(self, number: int, program: BuiltProgram) -> None:
        """Give a program a number; bindings of the one that had it are gone."""
        self._programs[number] = program
        self._bindings.pop(number, None)
        self._prepared.pop(number, None)

    def program(self, number: Any) -> BuiltProgram:
        """The program of this number."""
        found = self._programs.get(number) if type(number) is int else None
        if found is None:
            raise CallRefused(FailureKind.MISSING, f"program {number!r:.40}", {"missing": []})
        return found

    def bind(self, program: int, binding: Binding) -> None:
        """Remember a program's binding instead of its former one."""
        self._bindings[program] = binding
        self._prepared.pop(program, None)

    def binding(self, program: int, number: Any) -> Binding | None:
        """The program's binding of this number; None for no number."""
        if number is None:
            return None
        found = self._bindings.get(program)
        if found is None or found.number != number or found.gone:
            raise CallRefused(FailureKind.MISSING, f"binding {number!r:.40}", {"missing": []})
        return found

    def take_arena(self, arena: memoryview) -> None:
        """Use this memory from now on; nothing lies in the former one any more."""
        self.arena = arena
        self._prepared.clear()

    def close(self) -> None:
        """Let go of everything."""
        self.arena = None
        self._prepared.clear()
        self._bindings.clear()
        self._programs.clear()

    def prepared(self, program: int, described: Any, binding: Binding | None) -> Any:
        """What was prepared for a call that said the same, or None."""
        found = self._prepared.get(program)
        if found is None or found[1] is not binding or found[0] != described:
            return None
        return found[2]

    def prepare(self, program: int, described: Any, binding: Binding | None, inputs: Any) -> None:
        """Remember what the inputs of a call are made of, for the next one that says the same."""
        self._prepared[program] = (described, binding, inputs)

    def forget_prepared(self, program: int) -> None:
        """Prepare the program's next call from its description."""
        self._prepared.pop(program, None)
