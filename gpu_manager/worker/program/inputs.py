"""The inputs of a call or binding, from what the wire says to tensors on the device."""

import operator
from typing import Any

import torch

from gpu_manager.call_errors import CallRefused
from gpu_manager.devices.worker_device import DeviceImage, Refill, WorkerDevice
from gpu_manager.worker.program.channel_state import (
    Binding,
    InputStorage,
    KeptStorages,
    TensorInput,
    positions_of,
)
from gpu_manager.worker.program.tensor_specs import read_spec, view
from torch_shim.wire.messages import FromArea, FromImage, FromKept, SentTensor
from torch_shim.wire.protocol import FailureKind

_MOST_LASTING_BYTES = 1 << 20  # of inputs whose copies may stay for the next call

_version_of = operator.attrgetter("_version")  # the counter that autograd goes by

NO_AREA = memoryview(b"")


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
