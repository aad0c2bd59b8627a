"""TLS towards a GPU manager elsewhere: a thread encrypts what goes through a pair of sockets.

Everything above goes on with a plain socket, on which one thread may read while another writes:
OpenSSL's own objects allow only one at a time.
"""

import contextlib
import hashlib
import hmac
import os
import select
import socket
import ssl
import threading
import weakref

from torch_shim.errors import ConnectionLost

_PIECE_BYTES = 256 << 10

# Those of this process: a forked child closes its copies.
_PUMPS: weakref.WeakSet["_Pump"] = weakref.WeakSet()


class SecuredEnd(socket.socket):
    """Our end of a pipe to a TLS stream: bytes alone go through it, no file descriptors."""


def pipe() -> tuple[SecuredEnd, socket.socket]:
    """The two ends of one: who speaks in the clear has the first, who encrypts the second."""
    clear, encrypting = socket.socketpair()
    return SecuredEnd(fileno=clear.detach()), encrypting


def carries_descriptors(connection: socket.socket) -> bool:
    """Whether the other side of a socket is a process of this machine, which takes descriptors."""
    return connection.family == socket.AF_UNIX and not isinstance(connection, SecuredEnd)


def fingerprint(certificate: bytes) -> str:
    """What names a certificate (DER) in an address: SHA-256 in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def secured(connection: socket.socket, host: str, wanted: str, timeout_s: float) -> SecuredEnd:
    """Speak TLS on a connected socket, which is this function's from now on.

    The other side must show the certificate with the wanted fingerprint, or, where none is wanted,
    one of this host that the machine trusts; ConnectionLost where it does not.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if wanted:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # no authority is asked: the fingerprint decides
    try:
        connection.settimeout(timeout_s)
        stream = context.wrap_socket(connection, server_hostname=host)
    except (OSError, ValueError) as error:
        connection.close()
        raise ConnectionLost(f"no TLS with {host}: {error}") from error
    shown = fingerprint(stream.getpeercert(binary_form=True) or b"")
    if wanted and not hmac.compare_digest(shown, wanted.lower()):
        stream.close()
        raise ConnectionLost(f"{host} shows another certificate than its address says: {shown}")
    clear, encrypting = pipe()
    pump = _Pump(stream, encrypting)
    threading.Thread(target=pump.run, name="gpufaas-tls", daemon=True).start()
    return clear


class _Pump:
    """Carries bytes between a TLS stream and a plain socket until either side ends."""

    def __init__(self, stream: ssl.SSLSocket, plain: socket.socket) -> None:
        stream.setblocking(False)
        plain.setblocking(False)
        self._stream = stream
        self._plain = plain
        self._room_in = memoryview(bytearray(_PIECE_BYTES))
        self._room_out = memoryview(bytearray(_PIECE_BYTES))
        self._in = self._room_in[:0]  # what is still to go to the plain socket
        self._out = self._room_out[:0]  # and to the stream
        _PUMPS.add(self)

    def run(self) -> None:
        """Carry; both are closed afterwards."""
        with contextlib.suppress(OSError, EOFError):  # one side is gone, and the other learns it
            while True:
                carried = [self._carry_in(), self._carry_out()]
                if not any(carried):
                    self._wait()
        self.close()

    def close(self) -> None:
        """Close both, without a word: in a forked child the words are the parent's."""
        self._plain.close()
        self._stream.close()

    def _carry_in(self) -> bool:
        """One piece from the stream; False where there is none, or no room for it."""
        if not self._in:
            try:
                self._in = self._room_in[: self._stream.recv_into(self._room_in)]
            except ssl.SSLWantReadError:
                return False
            if not self._in:
                raise EOFError
        try:
            self._in = self._in[self._plain.send(self._in) :]
        except BlockingIOError:
            return False
        return True

    def _carry_out(self) -> bool:
        """One piece to the stream."""
        if not self._out:
            try:
                self._out = self._room_out[: self._plain.recv_into(self._room_out)]
            except BlockingIOError:
                return False
            if not self._out:
                raise EOFError
        try:
            self._out = self._out[self._stream.send(self._out) :]
        except ssl.SSLWantWriteError:
            return False
        return True

    def _wait(self) -> None:
        """Until something can be carried. A side of which nothing is wanted is not looked at."""
        poll = select.poll()
        stream = (0 if self._in else select.POLLIN) | (select.POLLOUT if self._out else 0)
        plain = (0 if self._out else select.POLLIN) | (select.POLLOUT if self._in else 0)
        for side, events in ((self._stream, stream), (self._plain, plain)):
            if events:
                poll.register(side, events)
        poll.poll()


def _forget_parents() -> None:
    """Its pumps have no thread here, and a copy left open would keep its connections open."""
    for pump in list(_PUMPS):
        pump.close()


os.register_at_fork(after_in_child=_forget_parents)
