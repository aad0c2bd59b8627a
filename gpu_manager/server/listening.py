"""Listens for clients, by TLS too, and serves each of them on a separate connection."""

import asyncio
import errno
import fcntl
import logging
import os
import socket
import ssl
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from common.addresses import Address, TcpAddress, TlsAddress, UnixAddress
from common.tasks import BackgroundTasks, until_first
from common.time_limits import time_limit
from gpu_manager.errors import AddressInUse, BadSetting
from gpu_manager.server.connection import ClientConnection
from gpu_manager.server.requests import Services
from torch_shim.wire.connections import SecuredEnd, configure_tcp, fingerprint, pipe

log = logging.getLogger(__name__)

_RETRY_S = 0.1


# Listening sockets: a stale socket file is replaced; one in use raises AddressInUse.

_BACKLOG = 256
# Every user may connect: a client's credential determines its rights.
_SOCKET_MODE = 0o666


class ListeningSocket:
    """One listening socket; `address` is the address for clients."""

    def __init__(self, address: Address) -> None:
        """Raise AddressInUse if another manager listens there, BadSetting for other errors."""
        try:
            with ExitStack() as held:
                if isinstance(address, UnixAddress):
                    if not address.abstract:
                        _take_file(address, held)
                    self.address: Address = address
                    self.socket = _unix(address)
                else:
                    self.socket = _tcp(address)
                    host, port = self.socket.getsockname()[:2]
                    self.address = replace(address, host=host, port=port)
                self._held = held.pop_all()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(str(address)) from error
            raise BadSetting("address", str(address), error.strerror or str(error)) from error

    def close(self) -> None:
        self.socket.close()
        self._held.close()


def _take_file(address: UnixAddress, held: ExitStack) -> None:
    """Lock the socket's file until it and the lock's are removed; a stale one is replaced."""
    address.path.parent.mkdir(parents=True, exist_ok=True)
    held.callback(os.close, _lock(address))
    held.callback(_lock_path(address).unlink, missing_ok=True)
    address.path.unlink(missing_ok=True)  # stale: its owner no longer holds the lock
    held.callback(address.path.unlink, missing_ok=True)


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
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # its last owner removed the file just before


_PIECE_BYTES = 256 << 10
_SHUTDOWN_S = 1.0


class Certificate:
    """The certificate that this node presents to clients, with its key."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raise BadSetting if the files cannot be read, or do not match."""
        self._streams = BackgroundTasks(log, "a TLS stream")
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            self._context.load_cert_chain(certificate, key)
            self.fingerprint = _fingerprint(certificate.read_text())
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise BadSetting("certificate", str(certificate), str(error)) from error

    async def decrypted(self, client: socket.socket, handshake_s: float) -> SecuredEnd:
        """Return a plain socket for a client's TLS stream, and take ownership of `client`.

        Raise ConnectionError or SSLError if the handshake fails. Closing the returned socket closes
        the client's.
        """
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(_PIECE_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                client,
                ssl=self._context,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except BaseException:
            client.close()
            raise
        try:
            clear, encrypting = pipe()
        except OSError:  # for example too many open files
            transport.abort()
            raise
        encrypting.setblocking(False)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        task = self._streams.start(_carry(reader, writer, encrypting))

        def ended(_: asyncio.Task[None]) -> None:
            """Close both sides, even if the task was cancelled before it began."""
            encrypting.close()
            transport.abort()

        task.add_done_callback(ended)
        return clear


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, plain: socket.socket
) -> None:
    try:
        await until_first(_copy_in(reader, plain), _copy_out(plain, writer))
    finally:
        plain.close()
        await _shut_down(writer)


async def _shut_down(writer: asyncio.StreamWriter) -> None:
    """Shut TLS down and close the stream; wait only briefly for the client's answer."""
    writer.close()
    with suppress(OSError, TimeoutError):
        async with time_limit(_SHUTDOWN_S):
            await writer.wait_closed()


async def _copy_in(reader: asyncio.StreamReader, plain: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):  # the plain side has closed, which ends the stream
        while piece := await reader.read(_PIECE_BYTES):
            await loop.sock_sendall(plain, piece)


async def _copy_out(plain: socket.socket, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while piece := await loop.sock_recv(plain, _PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


def _fingerprint(pem: str) -> str:
    """Return the fingerprint of a chain's first certificate, which is the node's own."""
    end = "-----END CERTIFICATE-----"
    first = pem[: pem.index(end) + len(end)]
    return fingerprint(ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN") :]))


class ManagerServer:
    """The server for functions and administrators."""

    def __init__(self, services: Services, certificate: Certificate | None = None) -> None:
        """The certificate is presented to clients of `tls` addresses."""
        self._services = services
        self._certificate = certificate
        self._listeners: list[ListeningSocket] = []
        self._accepting = BackgroundTasks(log, "accepting connections")
        self._connections = BackgroundTasks(log, "a connection")

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses for clients, with the ports that the system chose."""
        return tuple(listener.address for listener in self._listeners)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def listen(self, addresses: Iterable[Address]) -> None:
        """Listen at these addresses; if one of them fails, listen at none."""
        try:
            for address in addresses:
                self._listeners.append(ListeningSocket(self.advertised(address)))
        except BaseException:
            self.stop_listening()
            raise
        for listener in self._listeners:
            self._accepting.start(self._accept(listener))
            log.info("listening at %s", listener.address)

    def advertised(self, address: Address) -> Address:
        """Return the address for functions: a `tls` one gets this node's fingerprint."""
        if not isinstance(address, TlsAddress) or address.fingerprint:
            return address
        if self._certificate is None:
            raise BadSetting("address", str(address), "it needs a certificate and its key")
        return replace(address, fingerprint=self._certificate.fingerprint)

    def stop_listening(self) -> None:
        """Accept no further clients; keep the open connections."""
        self._accepting.cancel()
        for listener in self._listeners:
            listener.close()

    async def close(self) -> None:
        self.stop_listening()
        await self._connections.close()

    async def _accept(self, listener: ListeningSocket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener.socket)
            except OSError as error:  # for example too many open files: retry later
                log.error("cannot accept a client at %s: %s", listener.address, error)
                await asyncio.sleep(_RETRY_S)
                continue
            self._connections.start(self._serve(client, listener.address))
            await asyncio.sleep(0)  # so that the connection's task owns the client's socket

    async def _serve(self, client: socket.socket, address: Address) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served in a task"
        with self._services.limits.stranger(task.cancel) as place:
            try:
                if client.family != socket.AF_UNIX:
                    configure_tcp(client)
                if isinstance(address, TlsAddress):
                    assert self._certificate is not None, "`advertised` has checked it"
                    client = await self._certificate.decrypted(client, self._services.hello_s)
            except OSError as error:
                client.close()
                text = "closed a connection at %s: %s"
                self._services.limits.strangers.warn(text, address, error)
                return
            await ClientConnection(client, self._services, place).serve()
