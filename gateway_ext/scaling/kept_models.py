"""Pins the models of functions with `com.gpufaas.keep` in GPU memory, through the scheduler.

Why the gateway repeats the pin: the core pins a model only on the GPUs that hold it, refuses a
model that no GPU holds, and drops the pin with its GPU. A pin that outlives both would be a new
field of the acquire, of its stream and of recordings. This loop needs none of that: it pins what
the scheduler can pin now, and checks once a minute.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from cache_manager.model.ids import ModelId
from common.tasks import BackgroundTasks
from common.time_limits import time_limit
from gateway_ext.calls.function_table import Function
from gateway_ext.model import FunctionId
from scheduler.api import EventRefused, SchedulerError
from scheduler.client.operator_client import OperatorClient

log = logging.getLogger(__name__)

# How often functions are read, and the scheduler's pins are checked.
EVERY_S = 1.0
CHECK_EVERY_S = 60.0
# How long the scheduler has to answer, and how long a failed question waits.
ANSWERED_WITHIN_S = 30.0
MOST_RETRY_S = 30.0
_FIRST_RETRY_S = 1.0
# A new scheduler learns only after some seconds what its nodes hold.
MOST_UNPINS = 6


@dataclass(slots=True)
class _KeptModel:
    """One model: whether a function's options ask to keep it, and whether it is pinned."""

    wanted: bool = True
    pinned: bool | None = False  # None: perhaps, as the last order was not answered
    failures: int = 0
    not_before_s: float = 0.0


class KeptModels:
    """Pins wanted models and unpins those that it pinned; use it as a context.

    Pins outlive this object: the next gateway keeps or ends them once it has learned the models.
    """

    def __init__(
        self,
        functions: Iterable[Function],
        pinning: OperatorClient,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._functions = functions
        self._pinning = pinning
        self._now_s = now_s
        self._kept: dict[FunctionId, tuple[ModelId, ...]] = {}
        self._hands: dict[ModelId, _KeptModel] = {}
        self._failures = 0
        self._not_before_s = 0.0
        self._check_at_s = 0.0
        self._tasks = BackgroundTasks(log, "keeping models in GPU memory")

    async def __aenter__(self) -> Self:
        self._tasks.start(self._watch(), name="kept models")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()

    async def _watch(self) -> None:
        while True:
            self._look()
            if self._now_s() >= self._not_before_s:
                await self._carry_out()
            await asyncio.sleep(EVERY_S)

    def _look(self) -> None:
        """A function whose models are unknown for now keeps its former models."""
        self._kept = {
            function.id: function.learned.models
            if function.learned.known
            else self._kept.get(function.id, ())
            for function in self._functions
            if function.options.keep and function.options.gpu
        }
        wanted = {model for models in self._kept.values() for model in models}
        for model in sorted(wanted - self._hands.keys()):
            self._hands[model] = _KeptModel()
        for model, hand in list(self._hands.items()):
            if (model in wanted) != hand.wanted:
                self._hands[model] = _KeptModel(model in wanted, hand.pinned)

    async def _carry_out(self) -> None:
        """Send every order that is due; pause when no scheduler answers."""
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
        """Find pins that ended with their GPU, or with a scheduler without a datastore."""
        believed = [model for model, hand in self._hands.items() if hand.wanted and hand.pinned]
        if not believed or self._now_s() < self._check_at_s:
            return
        async with time_limit(ANSWERED_WITHIN_S):
            pinned = await self._pinning.pinned()
        self._check_at_s = self._now_s() + CHECK_EVERY_S
        for model in believed:
            if model not in pinned:
                log.info("%s is no longer pinned", model)
                self._hands[model] = _KeptModel()

    async def _order(self, model: ModelId, hand: _KeptModel) -> None:
        if hand.pinned is hand.wanted:
            if not hand.wanted:
                del self._hands[model]
            return
        hand.pinned = None
        try:
            async with time_limit(ANSWERED_WITHIN_S):
                await (self._pinning.pin if hand.wanted else self._pinning.unpin)(model)
        except EventRefused as error:
            self._refused(model, hand, error)
            hand.pinned = False if hand.wanted or hand.failures >= MOST_UNPINS else None
        else:
            hand.pinned = hand.wanted
            log.info("%s is %s", model, "kept in GPU memory" if hand.wanted else "no longer kept")

    def _refused(self, model: ModelId, hand: _KeptModel, error: EventRefused) -> None:
        level = logging.DEBUG if hand.failures else logging.INFO
        verb = "pinned" if hand.wanted else "unpinned"
        log.log(level, "%s is not %s yet: %s", model, verb, error)
        hand.not_before_s = self._now_s() + self._retry_s(hand.failures)
        hand.failures += 1

    def _retry_s(self, failures: int) -> float:
        return min(MOST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(failures, 32))
