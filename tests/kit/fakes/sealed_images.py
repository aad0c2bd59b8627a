"""Images for tests: sealed shared memory as a shim would hand it over, and what is left of it."""

import contextlib
import fcntl
import gc
import os
from collections.abc import Sequence
from pathlib import Path

from gpu_manager.weights.sealed_images import MEMORY_NAME, SEALS
from tests.kit.waiting import StillWaiting, wait_until
from torch_shim.wire.image_digests import ImageTable, lay_out


def sealed_image(storages: Sequence[bytes], seals: int = SEALS) -> tuple[int, ImageTable]:
    """A descriptor that the caller owns, and its table."""
    table = lay_out(len(storage) for storage in storages)
    descriptor = os.memfd_create(MEMORY_NAME, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, table.total_bytes)
    for (offset, _), storage in zip(table.storages, storages, strict=True):
        os.pwrite(descriptor, storage, offset)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor, table


def content_of(descriptor: int, table: ImageTable) -> list[bytes]:
    """Every storage's bytes."""
    return [os.pread(descriptor, size, offset) for offset, size in table.storages]


def open_images() -> int:
    """How many images of managers and tests are open; those of shims have another name."""
    return len(_descriptors())


def drop_images() -> None:
    """Have the descriptors of all images refer to nothing, so that later tests count their own."""
    with Path(os.devnull).open("rb") as nothing:
        for descriptor in _descriptors():
            os.dup2(nothing.fileno(), descriptor)


def _descriptors() -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            if MEMORY_NAME in str(entry.readlink()):
                found.append(int(entry.name))
    return found


def images_left(kept: int = 0) -> int:
    """How many images stay open when what nobody refers to is collected and threads have ended.

    So many more are `kept` by what goes on.
    """
    if open_images() > kept:
        gc.collect()
        with contextlib.suppress(StillWaiting):
            wait_until(lambda: open_images() <= kept, "images are closed", within_s=30.0)
    return open_images() - kept
