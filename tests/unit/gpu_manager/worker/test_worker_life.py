"""The orders of a worker that nothing in it carries out."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpu_manager.worker import life, orders
from gpu_manager.worker.features import WorkerFeature
from tests.kit.processes.open_files import open_files, opened_since
from torch_shim.errors import ConnectionLost
from torch_shim.wire.protocol import FrameKind, FrameSocket

LOAD = orders.LoadImage(
    1,
    "d",
    [],
    0,
    1 << 40,
    0.0,
    0.0,
    arriving=False,
    shared=False,
    gpu_share=1.0,
    merged=0,
    together_bytes=0,
    ahead=False,
)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[FrameSocket]:
    """The manager's end of a worker that has no feature, and loads nothing."""
    features: tuple[type[WorkerFeature], ...] = ()
    monkeypatch.setattr(life, "FEATURES", features)
    monkeypatch.setattr(life.WorkerSetup, "load", lambda *_: None)
    monkeypatch.setattr(life.WorkerSetup, "_warm", lambda _: None)
    hook, stack_bytes = threading.excepthook, threading.stack_size()
    ours, theirs = socket.socketpair()
    worker = life._WorkerLife(theirs, os.getpid(), [], None)  # noqa: SLF001 - `live` ends the process
    threading.excepthook = hook
    threading.stack_size(stack_bytes)

    def obey() -> None:
        with theirs:
            worker.obey()

    thread = threading.Thread(target=obey)
    thread.start()
    manager = FrameSocket(ours)
    yield manager
    with suppress(ConnectionLost):  # it has ended by a fault
        manager.send(FrameKind.ORDER, orders.StopWorker())
    thread.join()
    manager.close()


def hear(manager: FrameSocket) -> None:
    """Wait until all orders up to now have been read."""
    manager.send(FrameKind.ORDER, orders.EndCalls(0, 0))
    assert orders.read(manager.receive()) == orders.CallsEnded(0, 0, 0.0)


def test_worker_without_a_feature_notes_its_orders_and_goes_on(manager: FrameSocket) -> None:
    manager.send(FrameKind.ORDER, orders.Warm("cpu", 0.0, 0))
    manager.send(FrameKind.ORDER, LOAD)
    hear(manager)
    files = open_files()
    with Path(os.devnull).open("rb") as file:
        order = orders.HandOver(1, "h", 8)
        manager.send(FrameKind.ORDER, order, (), [file.fileno()])
    noted = orders.read(manager.receive())
    assert isinstance(noted, orders.Note)
    assert "HandOver" in noted.text
    hear(manager)
    assert not opened_since(files)
