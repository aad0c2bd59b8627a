"""Tensors as the wire describes them, checked, and as torch has them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gpu_manager.call_errors import CallRefused
from torch_shim.wire.protocol import FailureKind

DTYPES: dict[str, torch.dtype] = {
    str(found)[len("torch.") :]: found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype) and not str(found).startswith(("torch.q", "torch.bits"))
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_MAX_ELEMENTS = 1 << 40


class TensorSpec(NamedTuple):
    """A tensor over some storage: strides and offset in elements, `end_bytes` in the storage."""

    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    offset: int
    end_bytes: int


def read_spec(name: str, shape: list[int], strides: list[int], offset: int) -> TensorSpec:
    """Check a description of a tensor; anything absurd is refused before memory is taken."""
    dtype = DTYPES.get(name)
    if dtype is None or len(shape) != len(strides):
        raise CallRefused(
            FailureKind.BAD_FRAME, f"tensor {name!r:.80} {shape!r:.80} {strides!r:.80}"
        )
    elements, span = 1, 1
    for size, stride in zip(shape, strides, strict=True):
        elements *= size
        span += (size - 1) * stride
    if elements > _MAX_ELEMENTS:
        raise CallRefused(FailureKind.BAD_FRAME, f"tensor of {elements} elements")
    return TensorSpec(
        dtype, shape, strides, offset, (offset + (span if elements else 0)) * dtype.itemsize
    )


def view(storage: torch.UntypedStorage, spec: TensorSpec) -> torch.Tensor:
    """The tensor over a storage, which must be large enough."""
    if spec.end_bytes > storage.nbytes():
        raise CallRefused(
            FailureKind.BAD_FRAME, f"tensor up to byte {spec.end_bytes} of {storage.nbytes()}"
        )
    empty = torch.empty(0, dtype=spec.dtype, device=storage.device)
    return empty.set_(storage, spec.offset, spec.shape, spec.strides)


def bytes_of(storage: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (stop - start,), (1,))


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte that a tensor uses in its storage, and the one behind its last."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    span = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        span += (length - 1) * stride
    return start, start + span * size


def identity(storage: torch.UntypedStorage) -> int:
    """A number that two storages alive at the same time have in common only if they are one."""
    return int(storage._cdata)  # noqa: SLF001 - the address of the storage itself, not of its data


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - the counter autograd goes by
