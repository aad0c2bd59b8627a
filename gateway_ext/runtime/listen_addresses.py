"""Listening sockets: `unix:/path`, `tcp:host:port`, or `fd:3`, which is inherited."""

import os
import socket
import stat
from pathlib import Path

_BACKLOG = 1024


class BadListenAddress(ValueError):
    """The address cannot be listened on."""


def listening(address: str) -> socket.socket:
    """A socket that listens there; an inherited one is not passed on to child processes."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return _unix(Path(rest))
    if kind == "tcp" and ":" in rest:
        host, _, port = rest.rpartition(":")
        return socket.create_server((host.strip("[]"), int(port)), backlog=_BACKLOG)
    if kind == "fd" and rest.isdecimal():
        os.set_inheritable(int(rest), False)
        return socket.socket(fileno=int(rest))
    raise BadListenAddress(f"{address!r} is not unix:/path, tcp:host:port or fd:number")


def leave(address: str) -> None:
    """Remove the file of a Unix socket."""
    kind, _, path = address.partition(":")
    if kind == "unix":
        Path(path).unlink(missing_ok=True)


def _unix(path: Path) -> socket.socket:
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()  # left by a process that was killed
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(str(path))
    found.listen(_BACKLOG)
    return found
