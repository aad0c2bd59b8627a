"""Listening sockets: a stale socket file is replaced; one in use raises AddressInUse."""

import errno
import fcntl
import os
import socket
from dataclasses import replace
from pathlib import Path

from common.addresses import Address, TcpAddress, TlsAddress, UnixAddress
from gpu_manager.errors import AddressInUse, BadSetting

_BACKLOG = 256
# Every user may connect: a client's credential determines its rights.
_SOCKET_MODE = 0o666


class ListeningSocket:
    """One listening socket; `address` is the address for clients."""

    def __init__(self, address: Address) -> None:
        """Raise AddressInUse if another manager listens there, BadSetting for other errors."""
        self._lock: int | None = None
        self._file: Path | None = None
        try:
            if not isinstance(address, UnixAddress):
                self.socket = _tcp(address)
                host, port = self.socket.getsockname()[:2]
                self.address: Address = replace(address, host=host, port=port)
                return
            self.address = address
            if not address.abstract:
                address.path.parent.mkdir(parents=True, exist_ok=True)
                self._lock = _lock(address)
                address.path.unlink(missing_ok=True)  # stale: its owner no longer holds the lock
                self._file = address.path
            self.socket = _unix(address)
        except OSError as error:
            self._release()
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(str(address)) from error
            raise BadSetting("address", str(address), error.strerror or str(error)) from error

    def close(self) -> None:
        """Close the socket, and remove its files."""
        self.socket.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            if self._file is not None:
                self._file.unlink(missing_ok=True)
            assert isinstance(self.address, UnixAddress)
            _lock_path(self.address).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def _tcp(address: TcpAddress | TlsAddress) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _bound(listening, where)


def _unix(address: UnixAddress) -> socket.socket:
    listening = _bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address.bound)
    if not address.abstract:
        address.path.chmod(_SOCKET_MODE)
    return listening


def _bound(listening: socket.socket, where: object) -> socket.socket:
    try:
        listening.bind(where)  # type: ignore[arg-type]  # a tuple or a string, by the family
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def _lock_path(address: UnixAddress) -> Path:
    return address.path.with_name(address.path.name + ".lock")


def _lock(address: UnixAddress) -> int:
    """Lock the socket's file, or raise AddressInUse; the lock ends with the process."""
    path = _lock_path(address)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise AddressInUse(str(address)) from error
        try:
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # its last owner removed the file just before
