"""The HTTP client of callbacks in a simulation: as much of aiohttp's as they use, no sockets."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import ClientTimeout
from yarl import URL

from common.errors import NoResponse
from common.http.asgi import Header
from common.http.client import HttpClient

_FIRST_BAD = 400


@dataclass(frozen=True, slots=True)
class SimulatedAnswer:
    """What the receiver of a callback answered."""

    status: int
    raw_headers: Sequence[Header]

    @property
    def ok(self) -> bool:
        return self.status < _FIRST_BAD


class SimulatedSession:
    """Posts over the connections of the simulated network."""

    def __init__(self) -> None:
        self._client = HttpClient()

    @asynccontextmanager
    async def post(
        self,
        url: URL,
        *,
        data: bytes,
        headers: Sequence[tuple[str, str]],
        allow_redirects: bool,
        timeout: ClientTimeout,
    ) -> AsyncIterator[SimulatedAnswer]:
        """One request and its answer; OSError without one."""
        assert not allow_redirects, "a callback follows none"
        del timeout  # of the network: it cuts what hangs
        head = [f"POST {url.raw_path} HTTP/1.1", f"host: {url.host}"]
        head += [f"{name}: {value}" for name, value in headers]
        text = "\r\n".join(head).encode("latin-1") + b"\r\n\r\n"
        try:
            connection = await self._client.connect(f"tcp:{url.host}:{url.port}")
            try:
                await connection.ask(text + data)
                while not connection.complete:
                    await connection.more()
                connection.take()
                yield SimulatedAnswer(connection.status, connection.headers)
            finally:
                connection.let_go()
        except NoResponse as error:
            raise OSError(str(error)) from error

    async def close(self) -> None:
        self._client.close()
