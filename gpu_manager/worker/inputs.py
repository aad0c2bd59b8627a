"""The inputs of a call or binding, from what the wire says to tensors on the device."""

from typing import Any, NamedTuple

import torch

from gpu_manager.worker.device import Device
from gpu_manager.worker.errors import Refused
from gpu_manager.worker.image import Image
from gpu_manager.worker.session import Binding, Held, Kept
from gpu_manager.worker.tensors import read_spec, view
from torch_shim.protocol import Failure

_IMAGE, _KEPT, _AREA = 0, 1, 2
_IMAGE_FIELDS, _KEPT_FIELDS, _AREA_FIELDS = 4, 3, 5
_TENSOR_FIELDS = 5

NO_AREA = memoryview(b"")


class Given(NamedTuple):
    """One tensor input: its position, the tensor, and the storage it lies in."""

    position: int
    tensor: torch.Tensor
    held: Held


class Inputs:
    """Everything a program gets in one call."""

    def __init__(self, values: list[Any], given: list[Given], end_bytes: int) -> None:
        self.values = values
        self.given = given
        self.end_bytes = end_bytes  # of the area, behind the last byte that an input takes

    def batch(self) -> int:
        """The first dimension of the largest input, 0 where there is none."""
        largest = max(
            (given.tensor for given in self.given if given.held.image is None),
            key=torch.Tensor.numel,
            default=None,
        )
        return 0 if largest is None or not largest.dim() else largest.size(0)


class Reader:
    """Reads descriptions of tensors; equal sources become one storage."""

    def __init__(
        self, device: Device, images: dict[str, Image], kept: Kept, area: memoryview = NO_AREA
    ) -> None:
        self._device = device
        self._images = images
        self._kept = kept
        self._area = area
        self._held: dict[tuple[int, ...], Held] = {}
        self._missing: list[int] = []
        self._end_bytes = 0

    def call(self, described: Any, count: int, binding: Binding | None) -> Inputs:
        """The inputs of a call of a program that takes `count`."""
        if not isinstance(described, list) or len(described) != count:
            raise Refused(Failure.BAD_FRAME, f"the program takes {count} inputs")
        values: list[Any] = [None] * count
        given = []
        for position, entry in enumerate(described):
            if isinstance(entry, list):
                found = self._tensor(entry)
                if found is not None:
                    given.append(Given(position, *found))
                    values[position] = found[0]
            elif entry is None or isinstance(entry, (bool, int, float)):
                values[position] = entry
            else:
                raise Refused(Failure.BAD_FRAME, f"input {position} is {entry!r:.40}")
        self._check_missing()
        if binding is not None:
            for position, tensor, held in binding.tensors:
                if described[position] is None:
                    values[position] = tensor
                    given.append(Given(position, tensor, held))
        return Inputs(values, given, self._end_bytes)

    def binding(self, number: Any, described: Any, count: int) -> Binding:
        """The inputs that a BIND names."""
        if not isinstance(described, dict) or type(number) is not int:
            raise Refused(Failure.BAD_FRAME, "a binding is a number and a map")
        tensors: dict[int, tuple[torch.Tensor, Held]] = {}
        for position, entry in described.items():
            if type(position) is not int or not 0 <= position < count:
                raise Refused(Failure.BAD_FRAME, f"no input {position!r:.40}")
            found = self._tensor(entry)
            if found is not None:
                tensors[position] = found
        self._check_missing()
        return Binding(number, tensors)

    def _check_missing(self) -> None:
        if self._missing:
            detail = f"{len(self._missing)} kept storages"
            raise Refused(Failure.MISSING, detail, {"missing": self._missing})

    def _tensor(self, described: Any) -> tuple[torch.Tensor, Held] | None:
        """The tensor and its storage; None where that is not here any more."""
        if not isinstance(described, list) or len(described) < _TENSOR_FIELDS:
            raise Refused(Failure.BAD_FRAME, f"tensor {described!r:.60}")
        source, dtype, shape, strides, offset = described[:_TENSOR_FIELDS]
        spec = read_spec(dtype, shape, strides, offset)
        held = self._source(source)
        return None if held is None else (view(held.storage, spec), held)

    def _source(self, source: Any) -> Held | None:
        if not isinstance(source, list) or not source or len(source) > _AREA_FIELDS:
            raise Refused(Failure.BAD_FRAME, f"source {source!r:.60}")
        kind, *rest = source
        if kind == _IMAGE and len(source) == _IMAGE_FIELDS:
            return self._weights(*rest)
        if not all(type(number) is int and number >= 0 for number in rest):
            raise Refused(Failure.BAD_FRAME, f"source {source!r:.60}")
        if kind == _KEPT and len(source) == _KEPT_FIELDS:
            key, epoch = rest
            held = self._kept.find(key, epoch)
            if held is None:
                self._missing.append(key)
            return held
        if kind == _AREA and len(source) == _AREA_FIELDS:
            return self._sent(*rest)
        raise Refused(Failure.BAD_FRAME, f"source {source!r:.60}")

    def _weights(self, digest: Any, offset: Any, size_bytes: Any) -> Held:
        image = self._images.get(digest) if isinstance(digest, str) else None
        if image is None or type(offset) is not int or type(size_bytes) is not int:
            raise Refused(Failure.UNKNOWN_MODEL, f"no image {digest!r:.80} in this worker")
        storage = image.storage(offset, size_bytes)
        if storage is None:
            raise Refused(Failure.BAD_FRAME, f"no storage of {size_bytes} bytes at {offset}")
        known = self._held.get((id(image), offset))
        if known is None:
            known = Held(storage, image=image, place=(offset, size_bytes))
            self._held[(id(image), offset)] = known
        return known

    def _sent(self, offset: int, size_bytes: int, key: int, epoch: int) -> Held:
        if offset + size_bytes > len(self._area):
            raise Refused(Failure.BAD_FRAME, f"{size_bytes} bytes at {offset} of the area")
        known = self._held.get((offset, size_bytes, key))
        if known is None:
            storage = self._device.receive(self._area, offset, size_bytes, keep=key != 0)
            known = self._held[(offset, size_bytes, key)] = Held(storage, key, epoch)
            self._end_bytes = max(self._end_bytes, offset + size_bytes)
            if key:
                self._kept.keep(known)
        return known
