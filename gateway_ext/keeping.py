"""Has the models of functions that wish it (`com.gpufaas.keep`) pinned in GPU memory."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol, Self

from cache_manager.model import ModelId
from gateway_ext.model import FunctionId
from gateway_ext.table import Function
from scheduler.api import Refused, SchedulerError

log = logging.getLogger(__name__)


class Pinning(Protocol):
    """Who pins: `scheduler.client.SchedulerClient` with an administrator's token."""

    async def pin(self, model: ModelId) -> None:
        """Keep it wherever it is in GPU memory; Refused where it is nowhere."""
        ...

    async def unpin(self, model: ModelId) -> None:
        """Let it be evicted again; Refused where it is nowhere."""
        ...

    async def pinned(self) -> Collection[ModelId]:
        """The models that are pinned on some GPU."""
        ...


@dataclass(frozen=True, slots=True)
class KeepingPace:
    """How often it looks at the functions, and checks what the scheduler has pinned."""

    every_s: float = 1.0
    check_every_s: float = 60.0
    answered_within_s: float = 30.0
    first_retry_s: float = 1.0
    most_retry_s: float = 30.0
    # A scheduler that has just begun hears only in some seconds what its nodes hold.
    most_unpins: int = 6


@dataclass(slots=True)
class _Hand:
    """One model: whether a function wishes it to be kept, and whether it is pinned."""

    wanted: bool = True
    pinned: bool = False
    perhaps_pinned: bool = False
    failures: int = 0
    not_before_s: float = 0.0


class Keeping:
    """Pins what is to be kept, and unpins what it pinned; use it as a context.

    What is pinned at the end stays so: it is pinned again, or not, once the next gateway has
    learned the models anew.
    """

    def __init__(
        self,
        functions: Iterable[Function],
        pinning: Pinning,
        pace: KeepingPace,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._functions = functions
        self._pinning = pinning
        self._pace = pace
        self._now_s = now_s
        self._kept: dict[FunctionId, tuple[ModelId, ...]] = {}
        self._hands: dict[ModelId, _Hand] = {}
        self._failures = 0
        self._not_before_s = 0.0
        self._check_at_s = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch(), name="keeping")
        self._watching.add_done_callback(_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None, "use it as a context"
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            self._look()
            if self._now_s() >= self._not_before_s:
                await self._obey()
            await asyncio.sleep(self._pace.every_s)

    def _look(self) -> None:
        """What is wished now; while a function's models are not known again, those of before."""
        self._kept = {
            function.id: function.learned.models
            if function.learned.known
            else self._kept.get(function.id, ())
            for function in self._functions
            if function.wishes.keep and function.wishes.gpu
        }
        wanted = {model for models in self._kept.values() for model in models}
        for model in sorted(wanted - self._hands.keys()):
            self._hands[model] = _Hand()
        for model, hand in list(self._hands.items()):
            if (model in wanted) != hand.wanted:
                perhaps = hand.perhaps_pinned
                self._hands[model] = _Hand(model in wanted, perhaps_pinned=perhaps)

    async def _obey(self) -> None:
        """Give every order that is due; where no scheduler answers, none for a while."""
        try:
            await self._check()
            for model, hand in list(self._hands.items()):
                if self._now_s() >= hand.not_before_s:
                    await self._order(model, hand)
        except (SchedulerError, TimeoutError) as error:
            wait_s = self._retry_s(self._failures)
            self._failures += 1
            self._not_before_s = self._now_s() + wait_s
            why = str(error) or "the scheduler does not answer"
            log.warning("models are not kept: %s; next try in %g s", why, wait_s)
        else:
            self._failures = 0

    async def _check(self) -> None:
        """Pins end with their GPU, and with a scheduler that has no datastore."""
        believed = [model for model, hand in self._hands.items() if hand.pinned]
        if not believed or self._now_s() < self._check_at_s:
            return
        async with asyncio.timeout(self._pace.answered_within_s):
            pinned = await self._pinning.pinned()
        self._check_at_s = self._now_s() + self._pace.check_every_s
        for model in believed:
            if model not in pinned:
                log.info("%s is pinned no more", model)
                self._hands[model] = _Hand()

    async def _order(self, model: ModelId, hand: _Hand) -> None:
        if hand.wanted and not hand.pinned:
            await self._pin(model, hand)
        elif not hand.wanted and hand.perhaps_pinned:
            await self._unpin(model, hand)
        elif not hand.wanted:
            del self._hands[model]

    async def _pin(self, model: ModelId, hand: _Hand) -> None:
        hand.perhaps_pinned = True
        try:
            async with asyncio.timeout(self._pace.answered_within_s):
                await self._pinning.pin(model)
        except Refused as error:
            hand.perhaps_pinned = False
            self._refused(model, hand, error)
        else:
            hand.pinned = True
            log.info("%s is kept in GPU memory", model)

    async def _unpin(self, model: ModelId, hand: _Hand) -> None:
        try:
            async with asyncio.timeout(self._pace.answered_within_s):
                await self._pinning.unpin(model)
        except Refused as error:
            self._refused(model, hand, error)
            hand.perhaps_pinned = hand.failures < self._pace.most_unpins
        else:
            hand.perhaps_pinned = False
            log.info("%s is kept no more", model)

    def _refused(self, model: ModelId, hand: _Hand, error: Refused) -> None:
        level = logging.DEBUG if hand.failures else logging.INFO
        verb = "pinned" if hand.wanted else "unpinned"
        log.log(level, "%s is not %s yet: %s", model, verb, error)
        hand.not_before_s = self._now_s() + self._retry_s(hand.failures)
        hand.failures += 1

    def _retry_s(self, failures: int) -> float:
        return min(self._pace.most_retry_s, self._pace.first_retry_s * 2.0 ** min(failures, 32))


def _ended(task: asyncio.Task[None]) -> None:
    """A mistake of ours is not to end it without a word."""
    if not task.cancelled() and task.exception() is not None:
        log.error("models are kept no more", exc_info=task.exception())
