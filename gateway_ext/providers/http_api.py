"""What the clients of a cluster, an Engine and another provider share: HTTP with bounds.

ProviderFailed
├── ServerAway      it cannot be reached, or the connection broke
└── ServerRefused   it answered with an error
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from typing import NoReturn

import aiohttp

from gateway_ext.errors import ProviderFailed

BAD = 400  # the least status of an answer that refuses
CONNECT_S = 5.0
_LONGEST_REFUSAL_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 8 << 20  # etcd stores no object as large


class ServerAway(ProviderFailed):
    """The server cannot be reached, or the connection broke."""


class ServerRefused(ProviderFailed):
    """The server answered with an error; `status` is 0 within a stream."""

    def __init__(self, status: int, message: str, who: str = "") -> None:
        super().__init__(f"{who}{message}")
        self.status = status
        self.message = message


class PassingOver:
    """Goes on after what the server refuses with one of these statuses."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = statuses

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        return isinstance(error, ServerRefused) and error.status in self._statuses


@contextmanager
def translated(away: Callable[[str], ServerAway], late: str) -> Iterator[None]:
    """Raise what `away` makes of the reason if a connection breaks; that is `late` after a time."""
    try:
        yield
    except TimeoutError as error:
        raise away(late) from error
    except (aiohttp.ClientError, OSError) as error:
        raise away(str(error) or type(error).__name__) from error


async def lines(
    content: aiohttp.StreamReader, longest_bytes: int, too_long: Callable[[], object]
) -> AsyncGenerator[bytes, None]:
    """Lines without their ends; of a longer one `too_long` is told, and it is passed over.

    `readline` of the library fails at a bound of its own, and the stream cannot be read further.
    """
    held, is_skipped = bytearray(), False  # a long line may come in very many parts
    async for part in content.iter_any():
        *ends, rest = part.split(b"\n")
        for end in ends:
            if not is_skipped:
                yield bytes(held + end)
            held.clear()
            is_skipped = False
        if not is_skipped:
            held += rest
        if len(held) > longest_bytes:
            too_long()
            held.clear()
            is_skipped = True
    if held:
        yield bytes(held)


async def all_lines(
    answering: AbstractAsyncContextManager[aiohttp.ClientResponse], where: str
) -> AsyncGenerator[bytes, None]:
    """The lines of an answer; ProviderFailed if one is longer than any that is known."""

    def refuse() -> NoReturn:
        raise ProviderFailed(f"{where} sends lines without an end")

    async with (
        answering as answer,
        aclosing(lines(answer.content, _LONGEST_LINE_BYTES, refuse)) as read,
    ):
        async for line in read:
            yield line


async def refusal(answer: aiohttp.ClientResponse) -> bytes:
    """The text of an answer that refuses, or the beginning of a long one."""
    try:
        return await answer.content.readexactly(_LONGEST_REFUSAL_BYTES)
    except asyncio.IncompleteReadError as end:
        return end.partial
