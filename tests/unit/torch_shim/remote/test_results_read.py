"""A worker's answer is read only where everything in it fits together."""

import fcntl
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_shim.errors import BadFrame
from torch_shim.remote.received_results import Results
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.protocol import FrameKind
from torch_shim.wire.worker_peer import WorkerPeer

PLACE = [0, "float32", [4], [1], 0, False]
INPUT = torch.zeros(4)


def answer(
    storages: Any = ((0, 16, 0),),
    views: Any = (PLACE,),
    changed: Any = (),
    *,
    body: bytes = b"",
    file_bytes: int | None = None,
    seals: int = fcntl.F_SEAL_SHRINK,
    numbers: Sequence[Any] = (),
    arena_bytes: int = 64,
) -> tuple[Results, WorkerPeer]:
    """Read such an answer of a worker whose arena has this size."""
    descriptors: tuple[int, ...] = ()
    if file_bytes is not None:
        descriptors = (os.memfd_create("result", os.MFD_ALLOW_SEALING),)
        os.ftruncate(descriptors[0], file_bytes)
        fcntl.fcntl(descriptors[0], fcntl.F_ADD_SEALS, seals)
    meta = [_lists(storages), _lists(views), _lists(changed), None, [0.0] * 4, *numbers]
    frame = Frame(FrameKind.RESULT, meta, memoryview(body), descriptors)
    arena = SimpleNamespace(memory=bytearray(arena_bytes)) if arena_bytes else None
    channel: Any = SimpleNamespace(arena=arena)
    peer = WorkerPeer("w", takes_files_back=True)
    return Results(frame, channel, peer, [INPUT, 3]), peer


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _lists(entries: Any) -> Any:
    if not isinstance(entries, tuple):
        return entries
    return [list(entry) if isinstance(entry, tuple) else entry for entry in entries]


ABSURD: dict[str, dict[str, Any]] = {
    "no list of storages": {"storages": 7},
    "storage without a size": {"storages": ((0, 16),)},
    "negative size": {"storages": ((0, -16, 0),)},
    "size that is no number": {"storages": ((0, "16", 0),)},
    "offset that means nothing": {"storages": ((-3, 16, 0),)},
    "behind a frame that has nothing": {"storages": ((-1, 16, 0),)},
    "output in no storage": {"views": ((1, "float32", [4], [1], 0),)},
    "output longer than its storage": {"views": ((0, "float32", [5], [1], 0),)},
    "output behind its storage": {"views": ((0, "float32", [4], [1], 1),)},
    "output with wide strides": {"views": ((0, "float32", [2, 2], [8, 1], 0),)},
    "output of 2^60 elements": {"views": ((0, "float32", [1 << 60], [1], 0),)},
    "output with a negative stride": {"views": ((0, "float32", [2], [-1], 1),)},
    "output with a negative size": {"views": ((0, "float32", [-1], [1], 0),)},
    "output before its storage": {"views": ((0, "float32", [1], [1], -1),)},
    "output with more sizes than strides": {"views": ((0, "float32", [2, 2], [1], 0),)},
    "output of an unknown type": {"views": ((0, "float31", [4], [1], 0),)},
    "output of half a number": {"views": ((0, "float32", [1.5], [1], 0),)},
    "output of too few fields": {"views": ((0, "float32"),)},
    "output that is a text": {"views": ("text",)},
    "no list of outputs": {"views": "views"},
    "alias of an input that is not there": {"views": ((-3, "float32", [4], [1], 0),)},
    "alias of a number": {"views": ((-2, "float32", [4], [1], 0),)},
    "write to an input that is not there": {"changed": ((9, 0, 16),)},
    "write to input -1": {"changed": ((-1, 0, 16),)},
    "write to a number": {"changed": ((1, 0, 16),)},
    "write of more than the input has": {"changed": ((0, 0, 17),)},
    "body that ends too early": {"storages": ((-1, 16, 0),), "body": b"short"},
    "file that ends too early": {"storages": ((-1, 5000, 0),), "file_bytes": 4096},
    "file that could shrink": {
        "storages": ((-1, 16, 0),),
        "file_bytes": 4096,
        "seals": fcntl.F_SEAL_GROW,
        "numbers": (1,),
    },
    "file with a number that is none": {"numbers": ("1",)},
    "file with a negative number": {"numbers": (-1,)},
    "more fields than there are": {"numbers": (1, 2)},
}


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize("absurd", ABSURD.values(), ids=ABSURD.keys())
def test_answer_is_refused_when_it_does_not_fit_together(
    absurd: dict[str, Any], *, by_file: bool
) -> None:
    if by_file and "body" not in absurd:
        absurd = {"file_bytes": 8, **absurd}
    before = _descriptors()
    with pytest.raises(BadFrame):
        answer(**absurd)
    gc.collect()
    assert _descriptors() == before, "a descriptor was left open"


@pytest.mark.parametrize("offset", [1, 49, 1 << 62])
def test_part_is_refused_when_it_lies_beyond_the_arena(offset: int) -> None:
    results, _ = answer(storages=((0 if offset == 1 else offset, 64 + (offset == 1), 0),))
    with pytest.raises(BadFrame, match="bytes of a result at"):
        results.bytes_at(*results.storages[0][:2])


def test_file_is_given_back_once_nothing_maps_it_any_more() -> None:
    results, peer = answer(storages=((-1, 16, 0),), file_bytes=4096, numbers=(5,))
    storage = results.bytes_at(-1, 16)
    del results
    gc.collect()
    assert peer.take_dropped() == []
    del storage
    gc.collect()
    assert peer.take_dropped() == [-5]
