"""Outputs and changed inputs that stay with the worker until the function fetches them."""

import mmap
import os
import socket
from typing import Any

import pytest
import torch

from gpu_manager.worker.channel_server import CallObservers, ChannelServer
from gpu_manager.worker.orders import Admission
from tests.kit.waiting import wait_until
from tests.kit.worlds.caller import (
    LEASE,
    Caller,
    CallFailed,
    LocalWorker,
    program,
    step,
)
from torch_shim.errors import ConnectionLost
from torch_shim.wire.messages import STAYS, ChangedInput, OutputPart
from torch_shim.wire.programs import Ref
from torch_shim.wire.protocol import FrameKind

FIRST = 1 << 40
DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
GROW = program(step("m:add_", Ref(0), 1), output=[])


def staying(first: int = FIRST, least: int = 1, wanted: Any = (), dropped: Any = ()) -> list[Any]:
    """A call's options that let outputs stay."""
    return [None, None, [], None, "", None, [first, least, dict(wanted), list(dropped)]]


def kept(key: int, epoch: int = 0, size: int = 4) -> list[Any]:
    """A kept storage of floats as an input."""
    return [[1, key, epoch], "float32", [size], [1], 0]


def fetch(caller: Caller, key: int, epoch: int = 0) -> list[float]:
    """The floats that the worker keeps under a key."""
    frame = caller.ask(FrameKind.FETCH, [key, epoch])
    if frame.descriptors:
        (descriptor,) = frame.descriptors
        with mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE) as memory:
            data = bytes(memory)
        os.close(descriptor)
    else:
        data = bytes(frame.body)
    assert frame.meta.size_bytes == len(data)
    return torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()


@pytest.mark.parametrize("arena_bytes", [0, 1 << 16])
def test_output_is_fetched_and_used_again_when_it_has_stayed(arena_bytes: int) -> None:
    with LocalWorker().connect(arena_bytes=arena_bytes) as caller:
        reply = caller.call(DOUBLE, torch.arange(4.0), options=staying())
        assert reply.meta.storages == [OutputPart(STAYS, 16, True)]
        assert fetch(caller, FIRST) == [0, 2, 4, 6]
        again = caller.call(DOUBLE, kept(FIRST)).outputs
        assert again[0].tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize(
    ("least", "wanted", "stays"),
    [(1, [], True), (17, [], False), (1, [(0, 16)], False), (1, [(0, 15)], True), (16, [], True)],
)
def test_output_stays_unless_it_is_small_or_wanted(
    least: int, wanted: list[tuple[int, int]], *, stays: bool
) -> None:
    with LocalWorker().connect() as caller:
        reply = caller.call(DOUBLE, torch.arange(4.0), options=staying(least=least, wanted=wanted))
        assert (reply.meta.storages[0].offset == STAYS) is stays
        if not stays:
            assert reply.outputs[0].tolist() == [0, 2, 4, 6]


def test_outputs_are_sent_when_no_room_is_left_for_what_stays() -> None:
    worker = LocalWorker()
    worker.executor.sessions.sole_budget.most_bytes = 40
    with worker.connect() as caller:
        sent = [
            caller.call(DOUBLE, torch.arange(4.0), options=staying(first)).meta.storages[0].offset
            != STAYS
            for first in (100, 200, 300)
        ]
        assert sent == [False, False, True]
        options = staying(400, dropped=[100])
        assert (
            caller.call(DOUBLE, torch.arange(4.0), options=options).meta.storages[0].offset == STAYS
        )
        with pytest.raises(CallFailed, match="not held here"):
            fetch(caller, 100)
        assert fetch(caller, 200) == [0, 2, 4, 6]
    worker.join()
    assert worker.executor.sessions.sole_budget.size_bytes == 0


def test_changed_input_stays_and_has_the_next_epoch_when_it_is_kept() -> None:
    with LocalWorker().connect() as caller:
        first = caller.call(GROW, torch.arange(4.0), keys=[42], options=staying())
        assert first.meta.changed == [ChangedInput(0, STAYS, 16)]
        second = caller.call(GROW, kept(42, epoch=1), options=staying())
        assert second.meta.changed == [ChangedInput(0, STAYS, 16)]
        with pytest.raises(CallFailed, match="not held here"):
            fetch(caller, 42, epoch=1)
        assert fetch(caller, 42, epoch=2) == [2, 3, 4, 5]


def test_what_stays_is_parked_and_brought_back_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = LocalWorker()
    with worker.connect() as caller:
        caller.call(DOUBLE, torch.arange(4.0), options=staying())
        worker.device.keeps_memory = True  # as a GPU's allocator does
        monkeypatch.setattr(worker.device, "used_bytes", lambda: 1)
        worker.executor.memory.set_limit(0)
        assert [held.parked for held in worker.executor.sessions.sole()] == [True]
        worker.executor.memory.set_limit(1 << 40)
        assert caller.call(DOUBLE, kept(FIRST)).outputs[0].tolist() == [0, 4, 8, 12]
        assert [held.parked for held in worker.executor.sessions.sole()] == [False]
        assert fetch(caller, FIRST) == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "stay",
    [
        [],
        [0, 1, {}, []],
        [FIRST, 1, {}, [1.5]],
        [FIRST, 1, {1: "2"}, []],
        [FIRST, 1, {"1": 2}, []],
        [FIRST, "1", {}, []],
        [FIRST, 1, [], []],
        "all",
    ],
)
def test_call_is_refused_when_what_stays_is_nonsense(stay: Any) -> None:
    options = [None, None, [], None, "", None, stay]
    with LocalWorker().connect() as caller:
        with pytest.raises(CallFailed) as failed:
            caller.call(DOUBLE, torch.arange(4.0), options=options)
        assert failed.value.failure == "bad frame"
        assert caller.call(DOUBLE, torch.arange(4.0)).outputs[0].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("meta", [[], [1], ["1", 0], [1, 0, 0], {}, None])
def test_fetch_is_refused_when_it_is_nonsense(meta: Any) -> None:
    with LocalWorker().connect() as caller:
        with pytest.raises(CallFailed) as failed:
            caller.ask(FrameKind.FETCH, meta)
        assert failed.value.failure == "bad frame"


def test_function_gets_what_stayed_once_when_the_worker_ends() -> None:
    worker = LocalWorker()
    worker.leases.admit(Admission(LEASE, "s"))
    servers, callers = [], []
    for _ in range(2):  # channels of one session
        ours, theirs = socket.socketpair()
        observers = CallObservers(lambda *_: None, lambda *_: None)
        parts = ("s", "f", worker.executor, worker.programs, observers)
        servers.append(ChannelServer(theirs, *parts))
        worker.serve(servers[-1])
        callers.append(Caller(ours))
    with callers[0], callers[1]:
        callers[0].call(DOUBLE, torch.arange(4.0), options=staying())
        callers[1].call(DOUBLE, torch.ones(4), options=staying(FIRST + 7))
        for server in servers:
            server.end()
        frames = [frame for caller in callers for frame in _until_the_end(caller)]
        (left,) = frames
        assert left.kind is FrameKind.LEFT
        assert [entry[:2] for entry in left.meta] == [(FIRST, 0), (FIRST + 7, 0)]
        (descriptor, *_) = left.descriptors or (None,)
        content = left.body if descriptor is None else os.pread(descriptor, 1 << 16, 0)
        left.close_descriptors()
        found = [
            torch.frombuffer(bytearray(content[offset : offset + size]), dtype=torch.float32)
            for _, _, offset, size in left.meta
        ]
        assert [tensor.tolist() for tensor in found] == [[0, 2, 4, 6], [2, 2, 2, 2]]
    worker.join()
    wait_until(lambda: not worker.executor.sessions.sole(), "nothing is kept")


def _until_the_end(caller: Caller) -> list[Any]:
    frames = []
    try:
        while True:
            frames.append(caller.wire.receive())
    except ConnectionLost:
        return frames
