"""Bytes between storages and shared memory, few and many, and the layout of tensors."""

import mmap
from pathlib import Path

import pytest
import torch

from torch_shim.wire.shared_memory import (
    copy_of_bytes,
    layout_of,
    make_arena,
    span_of,
    write_bytes,
)

FEW, MANY = 100, 1 << 20


def numbers(count: int) -> torch.Tensor:
    return torch.randint(1, 256, (count,), dtype=torch.uint8)


def buffer(kind: str, size: int) -> mmap.mmap | bytearray | memoryview:
    if kind == "mmap":
        return mmap.mmap(-1, size)
    return bytearray(size) if kind == "bytearray" else memoryview(bytearray(size))


@pytest.mark.parametrize("kind", ["mmap", "bytearray", "memoryview"])
@pytest.mark.parametrize("count", [0, 1, FEW, MANY])
def test_bytes_come_back_as_they_were_written(kind: str, count: int) -> None:
    data = numbers(count + 7)
    area = buffer(kind, count + 64)
    write_bytes(area, 32, data.untyped_storage(), 7, count)
    assert bytes(area[32 : 32 + count]) == data[7:].numpy().tobytes()
    assert bytes(area[:32]) == bytes(32)
    assert bytes(area[32 + count :]) == bytes(32)
    found = copy_of_bytes(area, 32, count)
    area[32 : 32 + count] = bytes(count)
    assert found.nbytes() == count
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(found), data[7:])


@pytest.mark.parametrize("count", [FEW, MANY])
def test_no_byte_is_read_behind_a_storage_when_it_is_too_short(count: int) -> None:
    storage = numbers(count).untyped_storage()
    storage.resize_(0)
    area = bytearray(count)
    write_bytes(area, 0, storage, 0, count)  # torch makes it larger, as for any such tensor
    assert storage.nbytes() == count


def test_bytes_of_a_tensor_without_memory_are_refused() -> None:
    storage = torch.empty(FEW, dtype=torch.uint8, device="meta").untyped_storage()
    with pytest.raises((RuntimeError, NotImplementedError)):
        write_bytes(bytearray(FEW), 0, storage, 0, FEW)


@pytest.mark.parametrize(
    ("tensor", "span"),
    [
        (torch.empty(()), 1),
        (torch.empty(0), 0),
        (torch.empty(3, 0, 5), 0),
        (torch.empty(3, 4), 12),
        (torch.empty(3, 4).t(), 12),
        (torch.empty(3, 8)[:, ::2], 2 * 8 + 7),
        (torch.empty(5).expand(7, 5), 5),
        (torch.empty(10)[4:], 6),
    ],
)
def test_span_reaches_from_the_first_element_to_the_last(tensor: torch.Tensor, span: int) -> None:
    dtype, shape, strides, offset = layout_of(tensor)
    assert (dtype, shape, strides) == (tensor.dtype, list(tensor.shape), list(tensor.stride()))
    assert offset == tensor.storage_offset()
    assert span_of(shape, strides) == span


def test_arena_that_cannot_be_mapped_leaves_no_descriptor() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="memory"):
        make_arena(1 << 60)
    assert not set(Path("/proc/self/fd").iterdir()) - before
