"""TLS for functions on other machines: decrypts their streams into plain sockets."""

import asyncio
import logging
import socket
import ssl
from pathlib import Path

from common.tasks import BackgroundTasks, until_first
from common.time_limits import time_limit
from gpu_manager.errors import BadSetting
from torch_shim.wire.tls_client import SecuredEnd, fingerprint, pipe

log = logging.getLogger(__name__)

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
    """Copy bytes in both directions until either side closes; then close both."""
    try:
        await until_first(_copy_in(reader, plain), _copy_out(plain, writer))
    finally:
        plain.close()
        await _shut_down(writer)


async def _shut_down(writer: asyncio.StreamWriter) -> None:
    """Shut TLS down and close the stream; wait only briefly for the client's answer."""
    writer.close()
    try:
        async with time_limit(_SHUTDOWN_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        return


async def _copy_in(reader: asyncio.StreamReader, plain: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        while piece := await reader.read(_PIECE_BYTES):
            await loop.sock_sendall(plain, piece)
    except OSError:
        return  # the plain side has closed, which ends the stream


async def _copy_out(plain: socket.socket, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    try:
        while piece := await loop.sock_recv(plain, _PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    except OSError:
        return


def _fingerprint(pem: str) -> str:
    """Return the fingerprint of a chain's first certificate, which is the node's own."""
    end = "-----END CERTIFICATE-----"
    first = pem[: pem.index(end) + len(end)]
    return fingerprint(ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN") :]))
