"""TLS in front of a server that speaks none, as a proxy does it."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def encrypted(url: str, certificate: Path, key: Path) -> AsyncIterator[str]:
    """The https URL of a proxy in front of a server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    port = int(url.rpartition(":")[2])

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, further = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, further), carry(back, writer))

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.ensure_future(serve(reader, writer)))

    listening = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=context)
    yield f"https://localhost:{listening.sockets[0].getsockname()[1]}"
    listening.close()
    await asyncio.gather(*served)
