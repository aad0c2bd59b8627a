"""Listens for clients, and gives each of them a connection of its own."""

import asyncio
import logging
import socket
from collections.abc import Iterable
from dataclasses import replace

from gpu_manager.addresses import Address, TlsAddress
from gpu_manager.connection import Connection
from gpu_manager.errors import BadSetting
from gpu_manager.listening import Listener
from gpu_manager.services import Services
from gpu_manager.tls import Certificate

log = logging.getLogger(__name__)

_RETRY_S = 0.1
# A client whose machine went away without a word is noticed after about this many seconds.
_SILENCE_S = 15


class Server:
    """The manager's front door."""

    def __init__(self, services: Services, certificate: Certificate | None = None) -> None:
        """The certificate is for whoever comes by a `tls` address."""
        self._services = services
        self._certificate = certificate
        self._listeners: list[Listener] = []
        self._accepting: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where clients find it; ports that the system chose are named."""
        return tuple(listener.address for listener in self._listeners)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    def listen(self, addresses: Iterable[Address]) -> None:
        """Take clients from now on; where one address cannot be had, none is kept."""
        try:
            for address in addresses:
                self._listeners.append(Listener(self.shown(address)))
        except BaseException:
            self.stop_listening()
            raise
        for listener in self._listeners:
            task = asyncio.get_running_loop().create_task(self._accept(listener))
            self._accepting.add(task)
            log.info("listening at %s", listener.address)

    def shown(self, address: Address) -> Address:
        """An address as functions are told it: a `tls` one names the certificate of this node."""
        if not isinstance(address, TlsAddress) or address.fingerprint:
            return address
        if self._certificate is None:
            raise BadSetting("address", str(address), "it wants a certificate and its key")
        return replace(address, fingerprint=self._certificate.fingerprint)

    def stop_listening(self) -> None:
        """Take no further client; those that are there stay."""
        for task in self._accepting:
            task.cancel()
        self._accepting.clear()
        for listener in self._listeners:
            listener.close()

    async def close(self) -> None:
        """Close every connection."""
        self.stop_listening()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _accept(self, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener.socket)
            except OSError as error:  # too many open files, say: those that are open go on
                log.error("cannot take a client at %s: %s", listener.address, error)
                await asyncio.sleep(_RETRY_S)
                continue
            _watch_over(client)
            task = loop.create_task(self._serve(client, listener.address))
            self._connections.add(task)
            task.add_done_callback(self._ended)

    async def _serve(self, client: socket.socket, address: Address) -> None:
        if isinstance(address, TlsAddress):
            assert self._certificate is not None, "it was asked for when listening began"
            try:
                client = await self._certificate.decrypted(client, self._services.hello_s)
            except OSError as error:
                log.warning("closed a connection at %s: no TLS: %s", address, error)
                return
        await Connection(client, self._services).serve()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a connection failed", exc_info=error)


def _watch_over(client: socket.socket) -> None:
    """Answers are small and wanted at once; a dead machine must not hold leases for ever."""
    if client.family == socket.AF_UNIX:
        return
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S // 3)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 3)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)
