"""Dials GPU managers: `unix:/path`, `unix:@name`, `tcp:host:port`, `tls:host:port#FINGERPRINT`."""

import socket
from typing import Any

from torch_shim.errors import ConnectionLost
from torch_shim.wire.tls_client import secured

CONNECT_TIMEOUT_S = 5.0
# After about this many seconds a vanished machine is detected.
_SILENCE_S = 15


def connect(address: str) -> socket.socket:
    """Return a stream socket to a GPU manager; raise OSError or ConnectionLost if it fails."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return _connected(
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
            "\0" + rest[1:] if rest.startswith("@") else rest,
        )
    if scheme not in {"tcp", "tls"}:
        raise ConnectionLost(f"not an address of a GPU manager: {address!r}")
    where, _, fingerprint = rest.partition("#")
    host, _, port = where.rpartition(":")
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    _configure_tcp(connection)
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


def _configure_tcp(connection: socket.socket) -> None:
    """Send small requests without delay, and detect a peer machine that has died."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)
