"""Dials GPU managers: `unix:/path`, `unix:@name`, `tcp:host:port`, `tls:host:port#FINGERPRINT`."""

import socket
from typing import Any

from torch_shim.errors import ConnectionLost
from torch_shim.wire.tls_client import secured

CONNECT_TIMEOUT_S = 5.0
# A manager whose machine went away without a word is noticed after about this many seconds.
_SILENCE_S = 15


def connect(address: str) -> socket.socket:
    """A stream socket to a GPU manager; OSError or ConnectionLost where there is none."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return _connected(
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
            "\0" + rest[1:] if rest.startswith("@") else rest,
        )
    if scheme not in {"tcp", "tls"}:
        raise ConnectionLost(f"no address of a GPU manager: {address!r}")
    where, _, fingerprint = rest.partition("#")
    host, _, port = where.rpartition(":")
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    _watch_over(connection)
    host = host.strip("[]")
    _connected(connection, (host, int(port)))
    if scheme == "tcp":
        return connection
    return secured(connection, host, fingerprint, CONNECT_TIMEOUT_S)


def _connected(connection: socket.socket, where: Any) -> socket.socket:
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect(where)
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection


def _watch_over(connection: socket.socket) -> None:
    """Questions are small and wanted at once; a dead machine must not be waited for."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)
