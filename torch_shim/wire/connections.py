"""Connections to GPU managers, by Unix sockets, TCP (`tcp:host:port`) or TLS (`tls:`)."""

import contextlib
import hashlib
import hmac
import os
import select
import socket
import ssl
import threading
import weakref
from typing import Any

from torch_shim.errors import ConnectionLost

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
    configure_tcp(connection)
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


def configure_tcp(connection: socket.socket) -> None:
    """Send small messages without delay, and detect a peer machine that has died."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)


# TLS to a GPU manager on another machine: a thread encrypts the bytes of a socket pair.
#
# The layers above use a plain socket, on which one thread may read while another writes: OpenSSL's
# objects allow only one thread at a time.

_PIECE_BYTES = 256 << 10

# The pumps of this process; a forked child closes its copies.
_PUMPS: weakref.WeakSet["_Pump"] = weakref.WeakSet()


class SecuredEnd(socket.socket):
    """The plain end of a TLS stream: it carries bytes, but no file descriptors."""


def pipe() -> tuple[SecuredEnd, socket.socket]:
    """Return a socket pair: the first end is for plain data, the second for the encrypting side."""
    clear, encrypting = socket.socketpair()
    return SecuredEnd(fileno=clear.detach()), encrypting


def carries_descriptors(connection: socket.socket) -> bool:
    """Whether descriptors can be sent: the peer must be a process on this machine."""
    return connection.family == socket.AF_UNIX and not isinstance(connection, SecuredEnd)


def fingerprint(certificate: bytes) -> str:
    """Return the fingerprint of a certificate (DER) as in addresses: SHA-256 in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def secured(connection: socket.socket, host: str, wanted: str, timeout_s: float) -> SecuredEnd:
    """Start TLS on a connected socket, and take ownership of the socket.

    The peer must present the certificate with the wanted fingerprint or, if `wanted` is empty, a
    certificate for this host that the machine trusts. Otherwise ConnectionLost is raised.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if wanted:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the fingerprint replaces certificate authorities
    try:
        connection.settimeout(timeout_s)
        stream = context.wrap_socket(connection, server_hostname=host)
    except (OSError, ValueError) as error:
        connection.close()
        raise ConnectionLost(f"TLS with {host} failed: {error}") from error
    shown = fingerprint(stream.getpeercert(binary_form=True) or b"")
    if wanted and not hmac.compare_digest(shown, wanted.lower()):
        stream.close()
        raise ConnectionLost(f"{host} presents another certificate than its address names: {shown}")
    clear, encrypting = pipe()
    pump = _Pump(stream, encrypting)
    threading.Thread(target=pump.run, name="gpufaas-tls", daemon=True).start()
    return clear


class _Way:
    """One direction of a TLS stream: bytes from one socket to the other."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self._source = source
        self._sink = sink
        self._room = memoryview(bytearray(_PIECE_BYTES))
        self.left = self._room[:0]  # bytes still to be written

    def carry(self) -> bool:
        """Copy one piece; return False if there is none, or no room for it."""
        try:
            if not self.left:
                self.left = self._room[: self._source.recv_into(self._room)]
                if not self.left:
                    raise EOFError
            self.left = self.left[self._sink.send(self.left) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        return True


class _Pump:
    """Copies bytes between a TLS stream and a plain socket until either side closes."""

    def __init__(self, stream: ssl.SSLSocket, plain: socket.socket) -> None:
        stream.setblocking(False)
        plain.setblocking(False)
        self._stream = stream
        self._plain = plain
        self._in = _Way(stream, plain)
        self._out = _Way(plain, stream)
        _PUMPS.add(self)

    def run(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # one side has closed
            while True:
                carried = [self._in.carry(), self._out.carry()]
                if not any(carried):
                    self._wait()
        self.close()

    def close(self) -> None:
        """Close both sockets without a TLS shutdown, which only the parent process may send."""
        self._plain.close()
        self._stream.close()

    def _wait(self) -> None:
        """Wait until a piece can be copied; poll only the sides that are needed for it."""
        poll = select.poll()
        coming, going = self._in.left, self._out.left
        stream = (0 if coming else select.POLLIN) | (select.POLLOUT if going else 0)
        plain = (0 if going else select.POLLIN) | (select.POLLOUT if coming else 0)
        for side, events in ((self._stream, stream), (self._plain, plain)):
            if events:
                poll.register(side, events)
        poll.poll()


def _forget_parents() -> None:
    """Close the parent's pumps in a forked child: open copies would keep the connections open."""
    for pump in list(_PUMPS):
        pump.close()


os.register_at_fork(after_in_child=_forget_parents)
