"""What a replica needs of an instance of any kind: its settings, its readiness, its end."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from common.time_limits import time_limit
from gateway_ext.model import Endpoint

_EXITED = "exited with status "


def exited_with(status: object) -> str:
    """The reason of an end that the program itself chose."""
    return f"{_EXITED}{status}"


def chose_its_end(why: str) -> bool:
    """Whether an instance that ended for this reason was neither killed nor stopped by others."""
    return why.startswith(_EXITED)


class ManagedInstance(Protocol):
    """One container or process that serves a function, from its start to its end."""

    ready: bool
    exited: asyncio.Future[str]  # resolves to the reason of its end

    @property
    def name(self) -> str:
        """Its name in log lines and endpoints."""

    @property
    def endpoint(self) -> Endpoint: ...

    async def collect_output(self) -> None:
        """Store its output until it has ended and nothing is left of it."""

    async def until_ready(self, within_s: float) -> bool:
        """True once it can be called; False if it ends first or `within_s` passes."""

    async def stop(self, within_s: float) -> None:
        """Ask it to end; kill it after `within_s`."""

    def kill(self, why: str) -> None:
        """Kill it at once; `why` is the reason that `exited` resolves to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedSettings:
    """Bounds on the life of an instance and on the log of a function.

    `start_timeout_s` bounds the time until an instance is ready, `drain_s` the time that calls in
    flight get before it is stopped, `stop_s` the time between asking it to end and killing it.
    An instance that has died after a long life is replaced at once, another one after
    `first_pause_s`, which doubles up to `longest_pause_s`.
    """

    log_bytes: int = 2 << 20
    start_timeout_s: float = 600.0
    drain_s: float = 30.0
    stop_s: float = 30.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 60.0


_ANSWER_S = 5.0
_REQUEST = b"GET /_/%b HTTP/1.1\r\nHost: function\r\nConnection: close\r\n\r\n"
# An instance is asked often at first: most take calls within a second or two.
_FIRST_S, _OFTEN_S, _LATER_S = 2.0, 0.02, 0.2

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def wait_until_ready(
    is_ready: Callable[[], Awaitable[bool]], exited: asyncio.Future[str], within_s: float
) -> bool:
    """True once the instance is ready; False if it exits first or `within_s` passes."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    while not exited.done() and loop.time() < started_s + within_s:
        if await is_ready():
            return not exited.done()
        await asyncio.sleep(_OFTEN_S if loop.time() < started_s + _FIRST_S else _LATER_S)
    return False


async def answers(connecting: Awaitable[Connection], route: bytes) -> bool:
    """Whether our runtime answers well at `route`, `ready` or `health`.

    Without a route an open port is enough, as of an image that is not ours.
    """
    try:
        async with time_limit(_ANSWER_S):
            reader, writer = await connecting
            try:
                if not route:
                    return True
                writer.write(_REQUEST % route)
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):  # ValueError: the line exceeds the reader's limit
        return False
