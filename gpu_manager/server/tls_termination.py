"""TLS for functions elsewhere: their streams are decrypted here, and go on as plain sockets."""

import asyncio
import logging
import socket
import ssl
from pathlib import Path

from common.tasks import BackgroundTasks, until_first
from gpu_manager.errors import BadSetting
from torch_shim.wire.tls_client import SecuredEnd, fingerprint, pipe

log = logging.getLogger(__name__)

_PIECE_BYTES = 256 << 10
_GOODBYE_S = 1.0


class Certificate:
    """The certificate that this node shows to clients, with its key."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """BadSetting where they cannot be read, or are no pair."""
        self._streams = BackgroundTasks(log, "a TLS stream")
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            self._context.load_cert_chain(certificate, key)
            self.fingerprint = _fingerprint(certificate.read_text())
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise BadSetting("certificate", str(certificate), str(error)) from error

    async def decrypted(self, client: socket.socket, handshake_s: float) -> SecuredEnd:
        """A client's stream in the clear; ConnectionError or SSLError where it speaks no TLS.

        The client's socket is this function's from now on: it is closed when the stream is.
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
                ssl_shutdown_timeout=_GOODBYE_S,
            )
        except BaseException:
            client.close()
            raise
        clear, encrypting = pipe()
        encrypting.setblocking(False)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        task = self._streams.start(_carry(reader, writer, encrypting))

        def ended(_: asyncio.Task[None]) -> None:
            """Also of one that was cancelled before it began."""
            encrypting.close()
            transport.abort()

        task.add_done_callback(ended)
        return clear


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, plain: socket.socket
) -> None:
    """Bytes on both ways until either side ends, which ends the other one."""
    try:
        await until_first(_inwards(reader, plain), _out(plain, writer))
    finally:
        plain.close()
        await _goodbye(writer)


async def _goodbye(writer: asyncio.StreamWriter) -> None:
    """Say that nothing more comes, and close; a client that does not answer is not waited for."""
    writer.close()
    try:
        async with asyncio.timeout(_GOODBYE_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        return


async def _inwards(reader: asyncio.StreamReader, plain: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        while piece := await reader.read(_PIECE_BYTES):
            await loop.sock_sendall(plain, piece)
    except OSError:
        return  # that side is gone, and so is the stream


async def _out(plain: socket.socket, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    try:
        while piece := await loop.sock_recv(plain, _PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    except OSError:
        return


def _fingerprint(pem: str) -> str:
    """That of the first certificate of a chain, which is the node's own."""
    end = "-----END CERTIFICATE-----"
    first = pem[: pem.index(end) + len(end)]
    return fingerprint(ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN") :]))
