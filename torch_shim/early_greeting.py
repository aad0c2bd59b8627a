"""HELLO without waiting for its answer: a program is about to import torch.

A GPU manager that has not prepared its workers yet does so while this program imports torch.
"""

import os
import secrets
import socket

from torch_shim.wire.protocol import VERSION, FrameKind, pack_frame

_UNIX = "unix:"


def greet(address: str, credential: str) -> None:
    """Send a HELLO to a manager of this machine, and close; never wait, and never fail.

    Managers elsewhere are dialled by the first GPU call: over a network this would take time.
    """
    if not address.startswith(_UNIX):
        return
    path = address.removeprefix(_UNIX)
    hello = {"version": VERSION, "credential": credential, "session": secrets.token_hex(16)}
    frame = pack_frame(FrameKind.HELLO, [0, hello | {"pid": os.getpid(), "role": "shim"}])
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as manager:
            manager.connect("\0" + path[1:] if path.startswith("@") else path)
            manager.sendall(frame)
    except OSError:
        return  # it is away, or too busy to accept: the first GPU call dials it again
