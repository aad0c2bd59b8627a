"""A TCP connection through which nothing passes while it is cut, as in a network that is."""

import asyncio
from contextlib import suppress
from typing import Self


class Wire:
    """Relays from a loopback port to `port`; the relay can be cut and healed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._come, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *failure: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def whole(self) -> bool:
        """Whether it is not cut."""
        return self._whole.is_set()

    def cut(self) -> None:
        """From now on every byte is lost, and no connection ends."""
        self._whole.clear()

    def heal(self) -> None:
        """Connections of before are dead; new ones can be made."""
        self._whole.set()
        for end in self._ends:
            end.transport.abort()

    def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            await self._whole.wait()
            from_there, there = await asyncio.open_connection("127.0.0.1", self._port)
            self._ends.add(there)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, there))
                both.create_task(self._pass_on(from_there, writer))
        except (OSError, ExceptionGroup):
            pass  # one side has ended, and so does the other
        finally:
            for end in (writer, there):
                if end is not None:
                    self._ends.discard(end)
                    end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self._whole.is_set():
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.write_eof()
