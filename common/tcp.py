"""Options of TCP connections."""

import socket


def notice_silence(
    connection: socket.socket, silence_s: int, *, probes: int = 3, writes: bool = True
) -> None:
    """Make this connection fail once the other host has been silent for this long.

    A host that answers the kernel's probes is not silent, however slow its program is. With
    `writes` the connection also fails when data sent stays unacknowledged for as long.
    """
    every_s = silence_s // (probes + 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    if writes:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_s * 1000)
