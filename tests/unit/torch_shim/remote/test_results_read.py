"""A worker's answer is read only where everything in it fits together."""

import fcntl
import gc
import os
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kit.outcomes import instead_of
from tests.kit.processes.open_files import open_files, opened_since
from torch_shim.errors import BadFrame, RemoteFailure
from torch_shim.remote.values import AnswerLayout, Results
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.manager_session import WorkerPeer
from torch_shim.wire.protocol import Frame, FrameKind, FrameSocket, encode

PLACE = [0, "float32", [4], [1], 0]
INPUT = torch.zeros(4)


def answer(
    storages: Any = ((0, 16, False),),
    views: Any = (PLACE,),
    changed: Any = (),
    *,
    body: bytes = b"",
    file_bytes: int | None = None,
    seals: int = fcntl.F_SEAL_SHRINK,
    numbers: Sequence[Any] = (),
    arena_bytes: int = 64,
    known: AnswerLayout | None = None,
) -> tuple[Results, WorkerPeer]:
    """Read such an answer of a worker whose arena has this size."""
    descriptors: tuple[int, ...] = ()
    if file_bytes is not None:
        descriptors = (os.memfd_create("result", os.MFD_ALLOW_SEALING),)
        os.ftruncate(descriptors[0], file_bytes)
        fcntl.fcntl(descriptors[0], fcntl.F_ADD_SEALS, seals)
    meta = [_lists(storages), _lists(views), _lists(changed), None, [0.0] * 4, *numbers]
    frame = Frame(FrameKind.RESULT, encode(meta), memoryview(body), descriptors)
    arena = bytearray(arena_bytes) if arena_bytes else None
    channel: Any = SimpleNamespace(arena=arena)
    peer = WorkerPeer("w", "node")
    return Results(frame, channel, peer, [INPUT, 3], known), peer


def _lists(entries: Any) -> Any:
    if not isinstance(entries, tuple):
        return entries
    return [list(entry) if isinstance(entry, tuple) else entry for entry in entries]


ABSURD: dict[str, dict[str, Any]] = {
    "no list of storages": {"storages": 7},
    "storage without a size": {"storages": ((0, 16),)},
    "negative size": {"storages": ((0, -16, False),)},
    "size that is no number": {"storages": ((0, "16", False),)},
    "offset that means nothing": {"storages": ((-3, 16, False),)},
    "behind a frame that has nothing": {"storages": ((-1, 16, False),)},
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
    "body that ends too early": {"storages": ((-1, 16, False),), "body": b"short"},
    "file that ends too early": {"storages": ((-1, 5000, False),), "file_bytes": 4096},
    "file that could shrink": {
        "storages": ((-1, 16, False),),
        "file_bytes": 4096,
        "seals": fcntl.F_SEAL_GROW,
        "numbers": (1,),
    },
    "file with a number that is none": {"numbers": ("1",)},
    "file with a negative number": {"numbers": (-1,)},
    "more fields than there are": {"numbers": (1, 2)},
}


@pytest.mark.parametrize("by_file", [False, True])
def test_answer_is_refused_when_it_does_not_fit_together(*, by_file: bool) -> None:
    wrong = []
    for what, absurd in ABSURD.items():
        more = {"file_bytes": 8} if by_file and "body" not in absurd else {}
        before = open_files()
        taken = instead_of(BadFrame, answer, **{**more, **absurd})
        gc.collect()
        left_open = opened_since(before)
        if taken or left_open:
            wrong.append((what, taken, left_open))
    assert wrong == []


@pytest.mark.parametrize("offset", [1, 49, (1 << 62) - 1])
def test_part_is_refused_when_it_lies_beyond_the_arena(offset: int) -> None:
    results, _ = answer(storages=((0 if offset == 1 else offset, 64 + (offset == 1), False),))
    with pytest.raises(BadFrame, match="bytes of a result at"):
        results.bytes_at(results.storages[0].offset, results.storages[0].size_bytes)


def test_file_is_given_back_once_nothing_maps_it_any_more() -> None:
    results, peer = answer(storages=((-1, 16, False),), file_bytes=4096, numbers=(5,))
    storage = results.bytes_at(-1, 16)
    del results
    gc.collect()
    assert peer.take_dropped() == []
    del storage
    gc.collect()
    assert peer.take_dropped() == [-5]


def test_layout_is_taken_over_when_the_next_answer_says_the_same() -> None:
    first, _ = answer()
    second, _ = answer(known=first.layout)

    assert first.layout.holds
    assert second.layout is first.layout
    assert second.views == first.views
    assert second.size_bytes == first.size_bytes
    assert second.bytes_at(0, 16).nbytes() == 16


def test_answer_is_checked_when_it_says_something_else_than_the_one_before() -> None:
    first, _ = answer()

    with pytest.raises(BadFrame, match="output up to byte 20 of 16"):
        answer(views=((0, "float32", [5], [1], 0),), known=first.layout)
    with pytest.raises(BadFrame, match="Expected `int` >= 0"):
        answer(storages=((0, -16, False),), known=first.layout)


def test_answer_behind_its_frame_is_refused_when_nothing_came_though_its_layout_is_known() -> None:
    first, _ = answer(storages=((-1, 16, False),), body=bytes(64))

    assert first.layout.holds
    with pytest.raises(BadFrame, match="behind its frame"):
        answer(storages=((-1, 16, False),), known=first.layout)


@pytest.mark.parametrize(
    "said",
    [
        {"views": ((-1, "float32", [4], [1], 0),), "storages": ()},
        {"views": (PLACE, 3)},
        {"changed": ((0, 0, 16),)},
    ],
    ids=["an output in an input", "a number", "a written input"],
)
def test_layout_is_not_kept_when_it_depends_on_more_than_the_answer_s_shape(said: Any) -> None:
    found, _ = answer(**said)
    assert not found.layout.holds


@pytest.mark.parametrize("left", ["no list", [[5, 0, 0, 1 << 20]]])
def test_channel_is_closed_when_what_its_worker_left_cannot_be_read(left: object) -> None:
    ours, workers = socket.socketpair()
    channel, peer = DataChannel(FrameSocket(ours)), WorkerPeer("w", "node")
    with workers:
        FrameSocket(workers).send(FrameKind.LEFT, left)
        peer.sole.add(5)
        channel.broken = True
        peer.give(channel)
    assert ours.fileno() == -1
    with pytest.raises(RemoteFailure, match="only it had"):
        peer.fetch(5, None)
