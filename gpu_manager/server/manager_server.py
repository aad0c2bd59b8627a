"""Listens for clients, and gives each of them a connection of its own."""

import asyncio
import logging
import socket
from collections.abc import Iterable
from dataclasses import replace

from common.addresses import Address, TlsAddress
from common.tasks import BackgroundTasks
from common.tcp import notice_silence
from gpu_manager.errors import BadSetting
from gpu_manager.server.client_connection import ClientConnection
from gpu_manager.server.listening_socket import ListeningSocket
from gpu_manager.server.services import Services
from gpu_manager.server.tls_termination import Certificate

log = logging.getLogger(__name__)

_RETRY_S = 0.1
# A client whose machine vanished without closing is noticed after about this many seconds.
_SILENCE_S = 15


class ManagerServer:
    """The manager's front door."""

    def __init__(self, services: Services, certificate: Certificate | None = None) -> None:
        """The certificate is shown to clients of a `tls` address."""
        self._services = services
        self._certificate = certificate
        self._listeners: list[ListeningSocket] = []
        self._accepting = BackgroundTasks(log, "accepting connections")
        self._connections = BackgroundTasks(log, "a connection")

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
                self._listeners.append(ListeningSocket(self.shown(address)))
        except BaseException:
            self.stop_listening()
            raise
        for listener in self._listeners:
            self._accepting.start(self._accept(listener))
            log.info("listening at %s", listener.address)

    def shown(self, address: Address) -> Address:
        """An address as functions need it: a `tls` one names the certificate of this node."""
        if not isinstance(address, TlsAddress) or address.fingerprint:
            return address
        if self._certificate is None:
            raise BadSetting("address", str(address), "it wants a certificate and its key")
        return replace(address, fingerprint=self._certificate.fingerprint)

    def stop_listening(self) -> None:
        """Take no further client; those that are there stay."""
        self._accepting.cancel()
        for listener in self._listeners:
            listener.close()

    async def close(self) -> None:
        """Close every connection."""
        self.stop_listening()
        await self._connections.close()

    async def _accept(self, listener: ListeningSocket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener.socket)
            except OSError as error:  # too many open files, say: those that are open go on
                log.error("cannot take a client at %s: %s", listener.address, error)
                await asyncio.sleep(_RETRY_S)
                continue
            _watch_over(client)
            self._connections.start(self._serve(client, listener.address))

    async def _serve(self, client: socket.socket, address: Address) -> None:
        if isinstance(address, TlsAddress):
            assert self._certificate is not None, "it was asked for when listening began"
            try:
                client = await self._certificate.decrypted(client, self._services.hello_s)
            except OSError as error:
                log.warning("closed a connection at %s: no TLS: %s", address, error)
                return
        await ClientConnection(client, self._services).serve()


def _watch_over(client: socket.socket) -> None:
    """Answers are small and wanted at once; a dead machine must not hold leases for ever."""
    if client.family == socket.AF_UNIX:
        return
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_silence(client, _SILENCE_S, probes=2)
