"""HELLO to a GPU manager in the name of a function that is about to start.

A manager that has not prepared its workers yet does so while the function imports torch.
"""

import os
import secrets
import socket

from common.addresses import UnixAddress, parse_address
from torch_shim.wire.protocol import FrameKind, pack_frame


def announce(address: str, credential: str) -> None:
    """Send a HELLO to a manager of this machine, and close; never wait, and never fail.

    Managers elsewhere are told by the function itself: over a network this would take time.
    """
    manager = parse_address(address)
    if not isinstance(manager, UnixAddress):
        return
    hello = {"credential": credential, "session": secrets.token_hex(16)}
    frame = pack_frame(FrameKind.HELLO, [0, hello | {"pid": os.getpid(), "role": "shim"}])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
        try:
            connection.connect(manager.bound)
            connection.sendall(frame)
        except OSError:
            return  # it is away, or too busy to accept: the first GPU call dials it
