"""Frames to a GPU manager: an administrator's requests, and the HELLO of a starting function."""

import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from common.addresses import UnixAddress, parse_address
from gpufaas.errors import CommandError
from torch_shim.errors import OtherVersion, ShimError
from torch_shim.wire.connections import connect
from torch_shim.wire.protocol import Frame, FrameKind, FrameSocket, pack_frame


def default_address(environment: Mapping[str, str]) -> str:
    runtime = environment.get("XDG_RUNTIME_DIR")
    folder = Path("/run/gpufaas") if os.geteuid() == 0 or not runtime else Path(runtime) / "gpufaas"
    return f"unix:{folder / 'node.sock'}"


def request_admin(address: str, credential: str, **fields: str | None) -> dict[str, Any]:
    """The answer to one administrative request; CommandError says why there is none."""
    try:
        with closing(FrameSocket(connect(str(parse_address(address))))) as wire:
            wire.send(FrameKind.HELLO, [1, _hello(credential, "admin")])
            _answer(wire.receive())
            wire.send(FrameKind.ADMIN, [2, fields])
            return _answer(wire.receive())
    except OtherVersion as error:
        raise CommandError(f"the GPU manager at {address}: {error}") from error
    except (OSError, ShimError) as error:
        raise CommandError(f"no GPU manager answers at {address}: {error}") from error


def _hello(credential: str, role: str) -> dict[str, str | int]:
    session = secrets.token_hex(16)
    return {"credential": credential, "session": session, "pid": os.getpid(), "role": role}


def _answer(frame: Frame) -> dict[str, Any]:
    if frame.kind is FrameKind.REFUSED:
        _, failure, message, _ = frame.meta
        raise CommandError(f"{failure}: {message}")
    if frame.kind is not FrameKind.ANSWER:
        raise CommandError(f"the GPU manager sent {frame.kind.name} instead of an answer")
    fields: dict[str, Any] = frame.meta[1]
    return fields


def announce_start(address: str, credential: str) -> None:
    """Send a HELLO in the name of a function that is about to start; never wait, and never fail.

    A manager that has not prepared its workers yet does so while the function imports torch.
    Managers elsewhere are told by the function itself: over a network this would take time.
    """
    manager = parse_address(address)
    if not isinstance(manager, UnixAddress):
        return
    frame = pack_frame(FrameKind.HELLO, [0, _hello(credential, "shim")])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
        try:
            connection.connect(manager.bound)
            connection.sendall(frame)
        except OSError:
            return  # it is away, or too busy to accept: the first GPU call dials it
