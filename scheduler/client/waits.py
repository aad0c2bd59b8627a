"""Ends calls that wait at a scheduler after another scheduler has become the leader."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

log = logging.getLogger(__name__)

# The answer of a scheduler's /readyz; empty where it does not answer.
Look = Callable[[str], Awaitable[Mapping[str, Any]]]
_Answer = TypeVar("_Answer")


class LeaderPolling(NamedTuple):
    """When and how often to look for another leader; a frozen leader keeps its connections open."""

    long_s: float = 2.0
    every_s: float = 1.0
    answers_within_s: float = 1.0


class _Leader(NamedTuple):
    term: int
    url: str


class Waits:
    """While a call waits long, asks every scheduler which one leads (unless there is only one URL).

    `found` is called with a leader of a higher term before the calls that wait elsewhere are ended.
    """

    def __init__(
        self,
        urls: Sequence[str],
        look: Look,
        found: Callable[[str], None],
        pace: LeaderPolling = LeaderPolling(),  # noqa: B008 - it never changes
    ) -> None:
        self._urls = urls
        self._pace = pace
        self._look = look
        self._found = found
        self._waiting: dict[asyncio.Timeout, tuple[str, float]] = {}
        self._terms: dict[str, int] = {}
        self._watching: asyncio.Task[None] | None = None

    async def answer(self, url: str, asking: Awaitable[_Answer]) -> _Answer:
        """That scheduler's answer; TimeoutError once another scheduler leads."""
        if len(self._urls) == 1:
            return await asking
        async with asyncio.timeout(None) as limit:
            self._waiting[limit] = url, asyncio.get_running_loop().time()
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch(), name="leader lookup")
            try:
                return await asking
            finally:
                del self._waiting[limit]

    def led(self, url: str, term: int) -> None:
        """Note that the scheduler at this URL answered as the leader of this term."""
        self._terms[url] = max(term, self._terms.get(url, 0))

    async def close(self) -> None:
        """Stop polling."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def _watch(self) -> None:
        """Poll at the set interval, as long as a call waits."""
        while self._waiting:
            await asyncio.sleep(self._pace.every_s)
            long = self._long_waited_at()
            if long:
                leader = await self._leader([*self._urls, *long])
                if leader is not None:
                    self._break_off(leader)

    def _long_waited_at(self) -> list[str]:
        before_s = asyncio.get_running_loop().time() - self._pace.long_s
        return [url for url, since_s in self._waiting.values() if since_s < before_s]

    async def _leader(self, urls: Sequence[str]) -> _Leader | None:
        """The leader of the highest term, among these schedulers and those that they name."""
        found = await self._ask(urls)
        named = {
            str(readiness["leader"]) for readiness in found.values() if readiness.get("leader")
        }
        found |= await self._ask(sorted(named - found.keys()))
        leaders = [
            _Leader(readiness["term"], url)
            for url, readiness in found.items()
            if readiness.get("leading") and isinstance(readiness.get("term"), int)
        ]
        for term, url in leaders:
            self.led(url, term)
        return max(leaders, default=None)

    async def _ask(self, urls: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        asked = list(dict.fromkeys(urls))
        return dict(zip(asked, await asyncio.gather(*map(self._readiness, asked)), strict=True))

    async def _readiness(self, url: str) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(self._pace.answers_within_s):
                return await self._look(url)
        except TimeoutError:
            return {}

    def _break_off(self, leader: _Leader) -> None:
        """End the calls that wait at a leader of an earlier term, or at one that never answered."""
        now_s = asyncio.get_running_loop().time()
        lost = [
            (limit, url)
            for limit, (url, _) in self._waiting.items()
            if self._terms.get(url, 0) < leader.term and url != leader.url
        ]
        for url in sorted({url for _, url in lost}):
            log.warning(
                "%s leads in term %d: ending calls at %s",
                leader.url,
                leader.term,
                url,
            )
        if lost:
            self._found(leader.url)
        for limit, _ in lost:
            limit.reschedule(now_s)
