"""A wire that waits eagerly gives the same frames as one that sleeps."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from torch_shim.errors import ConnectionLost
from torch_shim.wire.frame_socket import FrameSocket
from torch_shim.wire.protocol import FrameKind

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
        assert (frame.meta, bytes(frame.body)) == ([number], bytes([number]) * 100)
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
