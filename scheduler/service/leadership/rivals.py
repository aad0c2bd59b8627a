"""The other schedulers: known from the datastore, and asked directly while it does not answer.

A leader that cannot reach the datastore cannot know whether another scheduler was elected. GPU
managers could report a new leader, but those attached to this leader have met none. So the leader
asks the schedulers that stood by when it last reached the datastore.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from logging import Logger

import aiohttp
from msgspec import Struct, json

from scheduler.model.errors import BadValue, DatastoreError
from scheduler.service.leadership.election import Leadership
from scheduler.store.datastore import Store, StoreLease
from scheduler.store.stored_records import key
from scheduler.wire.codec import encoded, read

CANDIDATES = "candidates/"

_TTL_S = 10
_REFRESH_S = 3.0
_LOOK_S = 1.0

# The term in which the scheduler at this URL leads; 0 if it does not lead or does not answer.
Ask = Callable[[str], Awaitable[int]]


@asynccontextmanager
async def standing_by(store: Store, name: str, url: str, log: Logger) -> AsyncIterator[None]:
    """Keep this scheduler listed in the datastore as a candidate."""
    task = asyncio.create_task(_stay_known(store, name, url, log))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with suppress(DatastoreError):
            await store.delete(key(CANDIDATES, url))


async def watch_rivals(store: Store, leadership: Leadership, ask: Ask, log: Logger) -> None:
    """While this scheduler leads: find out if another one leads, also without the datastore."""
    urls: list[str] = []
    while True:
        if leadership.confirmed:
            with suppress(DatastoreError):
                urls = _urls((await store.list(CANDIDATES)).values.values())
        else:
            for term in await asyncio.gather(*map(ask, urls)):
                if term > leadership.term:
                    log.warning("another scheduler leads, in term %d", term)
                    leadership.saw(term)
        await asyncio.sleep(_LOOK_S)


class _Candidate(Struct, frozen=True):
    name: str
    url: str


_CANDIDATES = json.Decoder(_Candidate)


async def _stay_known(store: Store, name: str, url: str, log: Logger) -> None:
    lease: StoreLease | None = None
    record = encoded(_Candidate(name, url))
    while True:
        try:
            if lease is None or not await store.refresh(lease):
                granted = await store.grant(_TTL_S)
                await store.put(key(CANDIDATES, url), record, granted)
                lease = granted
        except DatastoreError as error:
            log.debug("not listed as a candidate: %s", error)
        await asyncio.sleep(_REFRESH_S)


def _urls(values: Iterable[bytes]) -> list[str]:
    urls: list[str] = []
    for value in values:
        with suppress(BadValue):
            urls.append(read(_CANDIDATES, value).url)
    return urls


_PATIENCE_S = 1.0


async def term_at(url: str) -> int:
    """The term in which the scheduler at this URL leads; 0 if it does not lead or answer."""
    patience = aiohttp.ClientTimeout(total=_PATIENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=patience) as session,
            session.get(url.rstrip("/") + "/readyz") as answer,
        ):
            health = await answer.json()
        return int(health["term"]) if health["leading"] else 0
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError):
        return 0
