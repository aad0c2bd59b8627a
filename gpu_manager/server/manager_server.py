"""Listens for clients, and serves each of them on a separate connection."""

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
# After about this many seconds a client whose machine has vanished is detected.
_SILENCE_S = 15


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
        """The number of open connections."""
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
        """Close every connection."""
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
                _configure_tcp(client)
                if isinstance(address, TlsAddress):
                    assert self._certificate is not None, "`advertised` has checked it"
                    client = await self._certificate.decrypted(client, self._services.hello_s)
            except OSError as error:
                client.close()
                text = "closed a connection at %s: %s"
                self._services.limits.strangers.warn(text, address, error)
                return
            await ClientConnection(client, self._services, place).serve()


def _configure_tcp(client: socket.socket) -> None:
    """Send small answers without delay, and detect dead machines, which would hold leases."""
    if client.family == socket.AF_UNIX:
        return
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_silence(client, _SILENCE_S, probes=2)
