"""One instance: a process that serves one function through one socket, until it ends."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gateway_ext.model import Endpoint
from gateway_ext.providers.function_log import FunctionLog
from gateway_ext.providers.process import processes
from gateway_ext.providers.process.launching import MARK, Orders, launch
from gateway_ext.providers.process.lines import Lines

_BACKLOG = 1024
_ASK_S, _LATER_ASK_S, _SOON_S = 0.02, 0.2, 2.0
_ANSWER_S = 5.0
_DRAIN_OUTPUT_S = 0.5
_READY = b"GET /_/ready HTTP/1.1\r\nHost: function\r\nConnection: close\r\n\r\n"


class Place(NamedTuple):
    """Where instances of a function are: their sockets, their log, and what marks them as ours."""

    sockets: Path
    log: FunctionLog
    mark: str
    memory_bytes: int | None


class Instance:
    """A process from its start to its end, and to that of everything it has started."""

    def __init__(self, function: str, orders: Orders, place: Place) -> None:
        self.name = f"{function}-{secrets.token_hex(4)}"
        self.ready = False
        self.memory_bytes = place.memory_bytes
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._place = place
        self._why = ""
        self._path = place.sockets / f"{secrets.token_hex(5)}.sock"
        self._mark = f"{place.mark}/{self.name}"
        listener = _listener(self._path)
        try:
            started = launch(self._complete(orders, listener), [listener.fileno()])
        except BaseException:
            self._path.unlink()
            raise
        finally:
            listener.close()  # ours: who connects after the process's end is refused
        self._process = started.process
        self._output = started.output
        self._pidfd = os.pidfd_open(started.process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exit)

    @property
    def pid(self) -> int:
        """The leader of its session."""
        return self._process.pid

    @property
    def endpoint(self) -> Endpoint:
        """Where it is called."""
        return Endpoint(self.name, f"unix:{self._path}")

    async def collect(self) -> None:
        """Keeps what it writes; until it has ended, and everything that it has started."""
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._output, "rb", buffering=0)
        transport, lines = await loop.connect_read_pipe(
            lambda: Lines(self._place.log, self.name), pipe
        )
        try:
            await self.exited
            await asyncio.to_thread(processes.end_marked, self._mark)
            with contextlib.suppress(TimeoutError):  # held by somebody who hides well
                await asyncio.wait_for(lines.ended, _DRAIN_OUTPUT_S)
        finally:
            transport.close()

    async def until_ready(self, within_s: float) -> bool:
        """Whether it says that it is ready, in this time and before it ends."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while not self.exited.done() and loop.time() < started_s + within_s:
            if await self._says_ready():
                self.ready = not self.exited.done()
                return self.ready
            await asyncio.sleep(_ASK_S if loop.time() < started_s + _SOON_S else _LATER_ASK_S)
        return False

    async def stop(self, within_s: float) -> None:
        """Asks it to end, and makes it."""
        self.ready = False
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self.exited), within_s)
        except TimeoutError:
            self.kill(f"was killed: it did not end within {within_s:g} s")
            await asyncio.shield(self.exited)

    def kill(self, why: str) -> None:
        """At once, with everything in its session."""
        if not self.exited.done() and not self._why:
            self._why = why
            self._place.log.write(self.name, why)
        if not self.exited.done():
            processes.kill_session(self._process.pid)
            self._signal(signal.SIGKILL)

    def hold_to_memory(self, taken: processes.Taken) -> None:
        """Kills it where it has taken more than it may."""
        limit_bytes = self.memory_bytes
        if limit_bytes is not None and taken.own_bytes > limit_bytes:
            self.kill(
                f"was killed: it took {taken.own_bytes >> 20} MiB of memory,"
                f" its limit is {limit_bytes >> 20} MiB"
            )

    def taken(self) -> processes.Taken:
        """What it takes, with all processes that it has started."""
        if self.exited.done():
            return processes.Taken(0.0, 0, 0)
        return processes.taken(processes.sessions().get(self.pid, []))

    def _complete(self, orders: Orders, listener: socket.socket) -> Orders:
        environment = {
            **orders.environment,
            "HOSTNAME": self.name,
            "GPUFAAS_LISTEN": f"fd:{listener.fileno()}",
            MARK: self._mark,
        }
        return replace(orders, environment=environment)

    def _signal(self, number: int) -> None:
        if not self.exited.done():
            self._process.send_signal(number)

    def _exit(self) -> None:
        status = self._process.poll()
        if status is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ready = False
        self._path.unlink(missing_ok=True)
        self.exited.set_result(self._why or _told(status))

    async def _says_ready(self) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(str(self._path))
                try:
                    writer.write(_READY)
                    return b" 200 " in await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False


def _listener(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(str(path))
    path.chmod(0o600)
    found.listen(_BACKLOG)
    return found


def _told(status: int) -> str:
    if status >= 0:
        return f"exited with {status}"
    return f"was ended by {signal.Signals(-status).name}"
