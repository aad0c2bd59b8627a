"""Hosts that are all this machine: servers are reached through relays, which can be cut."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any, TypeVar

from gpufaas.stack.held_ports import HeldPort
from tests.kit.network.cut_wire import Wire
from tests.kit.network.networks import HERE

_SOON_S = 10.0
_MOST_BYTES = 65536

T = TypeVar("T")
# The sender of these first bytes to that host, if the bytes identify the sender.
Sender = Callable[[str, bytes], str]


class Relays:
    """A network as `NameSpaces` is one, for those who may make none."""

    silent = False

    def __init__(self, hosts: Sequence[str], sender: Sender) -> None:
        self._hosts = (HERE, *hosts)
        self._sender = sender
        self._ports = {host: HeldPort().keep() for host in hosts}
        self._wires: dict[tuple[str, str], Wire] = {}
        self._doors: dict[str, str] = {}
        self._cuts: set[frozenset[str]] = set()
        self._life = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays")

    def command(self, host: str, *command: str) -> list[str]:
        """What runs a command on that host."""
        del host
        return [*command]

    def listens_at(self, host: str) -> str:
        """HOST:PORT for whatever serves there."""
        return f"127.0.0.1:{self._ports[host]}"

    def url(self, host: str, asked_by: str = HERE) -> str:
        """Where that host is reached from another one; the URL for here is good for all."""
        if asked_by != HERE:
            return self._soon(self._wire(host, asked_by)).url
        if host not in self._doors:
            self._doors[host] = self._soon(self._door(host))
        return self._doors[host]

    def cut(self, host: str, *others: str) -> None:
        """From now on nothing passes between that host and these, or anybody."""
        self._cuts |= {frozenset((host, other)) for other in others or self._hosts if other != host}
        self._soon(self._set())

    def heal(self) -> None:
        """Everything passes again."""
        if self._cuts:
            self._cuts.clear()
            self._soon(self._set())

    @contextmanager
    def inside(self) -> Iterator[None]:
        """There is no outside."""
        yield

    def make(self) -> None:
        """Let relays work from now on."""
        self._thread.start()

    def end(self) -> None:
        """Leave nothing of them."""
        self._soon(self._life.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SOON_S)
        self._loop.close()

    # -- on their thread --------------------------------------------------------------------------

    def _soon(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_SOON_S)

    async def _set(self) -> None:
        for pair, wire in self._wires.items():
            self._set_one(wire, frozenset(pair))

    def _set_one(self, wire: Wire, pair: frozenset[str]) -> None:
        if pair in self._cuts:
            wire.cut()
        elif not wire.whole:
            wire.heal()

    async def _wire(self, host: str, asker: str) -> Wire:
        """The wire between these two."""
        found = self._wires.get((host, asker))
        if found is None:
            found = self._wires[host, asker] = Wire(self._ports[host])
            await self._life.enter_async_context(found)
            self._set_one(found, frozenset((host, asker)))
        return found

    async def _door(self, host: str) -> str:
        """The URL at which anybody is let in, to be led to the wire that is its own."""
        tasks: set[asyncio.Task[None]] = set()

        def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._lead(host, reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(come, "127.0.0.1", 0)

        async def close() -> None:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._life.push_async_callback(close)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _lead(
        self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        further: asyncio.StreamWriter | None = None
        try:
            first = await reader.read(_MOST_BYTES)
            wire = await self._wire(host, self._sender(host, first))
            back, further = await asyncio.open_connection("127.0.0.1", wire.port)
            further.write(first)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass_on(reader, further))
                both.create_task(_pass_on(back, writer))
        except (OSError, ExceptionGroup):
            pass  # one side has ended, and so does the other
        finally:
            for end in (writer, further):
                if end is not None:
                    end.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_MOST_BYTES):
        writer.write(data)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()
