"""A wire that waits eagerly, or for a peer that is slow, gives the same frames as any."""

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
from msgspec import msgpack

from torch_shim.errors import ConnectionLost
from torch_shim.wire import protocol
from torch_shim.wire.protocol import FrameKind, FrameSocket

PAUSES_S = (0.0, 0.0, 0.002, 0.0, 0.0001, 0.02, 0.0, 0.0)


@pytest.fixture
def wires() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    """An eager wire and its peer."""
    ours, theirs = socket.socketpair()
    pair = (FrameSocket(ours, eager=True), FrameSocket(theirs))
    yield pair
    for wire in pair:
        wire.close()


def test_frames_come_in_order_whatever_the_pauses(wires: tuple[FrameSocket, FrameSocket]) -> None:
    eager, peer = wires

    def send() -> None:
        for number, pause_s in enumerate(PAUSES_S):
            time.sleep(pause_s)
            peer.send(FrameKind.CALL, [number], [bytes([number]) * 100])

    sender = threading.Thread(target=send)
    sender.start()
    for number in range(len(PAUSES_S)):
        frame = eager.receive()
        assert (msgpack.decode(frame.packed), bytes(frame.body)) == (
            [number],
            bytes([number]) * 100,
        )
    sender.join()


def test_descriptors_come_through_an_eager_read(wires: tuple[FrameSocket, FrameSocket]) -> None:
    eager, peer = wires
    for _ in range(3):  # from the second on, the reader does not sleep first
        peer.send(FrameKind.ARENA, [1], descriptors=[peer.socket.fileno()])
        (descriptor,) = eager.receive().descriptors
        assert os.fstat(descriptor).st_ino == os.fstat(peer.socket.fileno()).st_ino
        os.close(descriptor)


def test_the_end_is_noticed_while_it_waits_eagerly(wires: tuple[FrameSocket, FrameSocket]) -> None:
    eager, peer = wires
    for _ in range(2):
        peer.send(FrameKind.DONE, [])
        eager.receive()
    peer.socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionLost, match="closed by the other side"):
        eager.receive()


class SlowPeer:
    """Instead of `select.poll`: waits in vain, while the peer reads all, so many times."""

    def __init__(self, peer: socket.socket) -> None:
        self.reads = 0
        self._peer = peer

    def register(self, *_: object) -> None:
        pass

    def poll(self, _within_ms: float) -> list[object]:
        if self.reads:
            self.reads -= 1
            read_all(self._peer)
        return []


def read_all(end: socket.socket) -> None:
    with suppress(BlockingIOError):
        while True:
            end.recv(1 << 20, socket.MSG_DONTWAIT)


def fill(end: socket.socket) -> None:
    with suppress(BlockingIOError):
        while True:
            end.send(bytes(1 << 16), socket.MSG_DONTWAIT)


@pytest.fixture
def slow(wires: tuple[FrameSocket, FrameSocket], monkeypatch: pytest.MonkeyPatch) -> SlowPeer:
    """The first wire's peer, for which it waits a second."""
    wires[0].send_timeout_s = 1.0
    found = SlowPeer(wires[1].socket)
    instead = SimpleNamespace(poll=lambda: found, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(protocol, "select", instead)
    return found


def test_peer_is_lost_when_it_takes_no_byte_and_not_when_it_takes_some(
    wires: tuple[FrameSocket, FrameSocket], slow: SlowPeer
) -> None:
    slow.reads = 1000
    wires[0].send(FrameKind.CHUNK, [0], [bytes(4 << 20)])
    assert 0 < slow.reads < 1000
    slow.reads = 1
    with pytest.raises(ConnectionLost, match="no byte in 1 s"):
        wires[0].send(FrameKind.CHUNK, [0], [bytes(4 << 20)])
    assert not slow.reads


def test_descriptors_come_once_when_there_was_no_room_for_them(
    wires: tuple[FrameSocket, FrameSocket], slow: SlowPeer
) -> None:
    eager, peer = wires
    fill(eager.socket)
    slow.reads = 1
    eager.send(FrameKind.ARENA, [1], [b"body"], descriptors=[peer.socket.fileno()])
    frame = peer.receive()
    assert (msgpack.decode(frame.packed), bytes(frame.body)) == ([1], b"body")
    (descriptor,) = frame.descriptors
    assert os.fstat(descriptor).st_ino == os.fstat(peer.socket.fileno()).st_ino
    os.close(descriptor)
