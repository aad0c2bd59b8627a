"""Connections by address: `unix:/path`, `tcp:host:port`, `tls:host:port`."""

import asyncio
import socket
import ssl
from collections.abc import Callable

_BACKLOG_PAUSE_S = 0.005


async def dial(
    protocol: Callable[[], asyncio.Protocol], address: str, tls: ssl.SSLContext | None
) -> asyncio.Transport:
    """Connect; OSError where nobody listens, or for an address of none of these forms."""
    loop = asyncio.get_running_loop()
    kind, _, where = address.partition(":")
    if kind in {"tcp", "tls"}:
        host, _, port = where.rpartition(":")
        transport, _ = await loop.create_connection(
            protocol,
            host.strip("[]"),
            int(port),
            ssl=tls or ssl.create_default_context() if kind == "tls" else None,
        )
        return transport
    if kind != "unix":
        raise OSError(f"{address!r} is neither a unix:, a tcp: nor a tls: address")
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        unix.setblocking(False)
        await _connect_unix(unix, where)
        transport, _ = await loop.create_unix_connection(protocol, sock=unix)
    except BaseException:
        unix.close()
        raise
    return transport


async def _connect_unix(unix: socket.socket, path: str) -> None:
    """Connect without the event loop, which takes a socket with a full backlog for connected."""
    while True:
        try:
            unix.connect(path)
        except BlockingIOError:  # the backlog is full, and the kernel offers no way to wait for it
            await asyncio.sleep(_BACKLOG_PAUSE_S)
        else:
            return
