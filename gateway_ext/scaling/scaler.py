"""Watches functions and scales them: to their load, to zero, and back."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import Logger
from typing import NamedTuple, Self

from common.tasks import BackgroundTasks
from common.telemetry.metrics import BoundedNames, Histogram, MetricFamily, gauge
from common.time_limits import time_limit
from gateway_ext import metrics
from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.errors import GatewayError, UnknownFunction
from gateway_ext.model import FunctionId
from gateway_ext.openfaas.function_options import FunctionOptions

Scale = Callable[[FunctionId, int], Awaitable[None]]

# How long a provider has to carry out an order.
SCALE_WITHIN_S = 60.0
# A provider confirms an order to its listener; until then, for at most this long, the order
# counts as done, and is not repeated.
BELIEVED_S = 10.0
# Over how long calls a second are counted, and how long a failed order waits.
_RATE_OVER_S = 10.0
_FIRST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
_LATE = f"the provider took longer than {SCALE_WITHIN_S:g} s"


_ALL_PERCENT = 100
# The pause between two steps up: a new replica has taken no load off the others yet.
_UP_EVERY_S = 2.0
# No more replicas are requested for this long while requested ones are missing.
_SETTLE_S = 30.0
# Replicas are removed only if fewer were enough for this long.
_DOWN_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Observed:
    """A function at one moment; `rate` is in calls a second, `queued` are async calls."""

    wanted: int
    available: int
    inflight: int = 0
    waiting: int = 0
    queued: int = 0
    rate: float = 0.0
    last_call_s: float = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.inflight or self.waiting or self.queued)


@dataclass(frozen=True, slots=True)
class Past:
    """What the rule remembers of earlier moments.

    `wanted` are the replicas of the last moment. `ready_at_s` is when an instance was first ready
    after replicas were added; infinite until then. `most` is the largest number needed since
    `fewer_since_s`, when fewer replicas than present began to suffice; infinite while all of them
    are needed.
    """

    wanted: int = 0
    ready_at_s: float = math.inf
    raised_at_s: float = -math.inf
    busy_at_s: float = -math.inf
    fewer_since_s: float = math.inf
    most: int = 0


class Decision(NamedTuple):
    """The wanted number of replicas, and the state for the next decision."""

    replicas: int
    past: Past


def decide(seen: Observed, options: FunctionOptions, past: Past, now_s: float) -> Decision:
    """A function at zero stays there until it is called."""
    past = noticed(past, seen.wanted, seen.available, now_s)
    if seen.busy:
        past = replace(past, busy_at_s=now_s)
    needed = needed_replicas(seen, options)
    if not seen.wanted:
        return _from_zero(seen, options, past, now_s)
    if _is_idle(seen, options, past, now_s):
        return Decision(0, replace(past, fewer_since_s=math.inf))
    if needed > seen.wanted:
        return _up(seen, needed, options, past, now_s)
    if needed < seen.wanted:
        return _down(seen.wanted, needed, past, now_s)
    return Decision(seen.wanted, replace(past, fewer_since_s=math.inf))


def noticed(past: Past, wanted: int, available: int, now_s: float) -> Past:
    """The state after a moment with these replicas; whoever added some, they count as new."""
    if wanted > past.wanted:
        past = ordered(past)
    if available and math.isinf(past.ready_at_s):
        past = replace(past, ready_at_s=now_s)
    return past if wanted == past.wanted else replace(past, wanted=wanted)


def ordered(past: Past) -> Past:
    """The state after somebody said how many replicas there should be: all waits begin again."""
    return replace(past, ready_at_s=math.inf, fewer_since_s=math.inf)


def needed_replicas(seen: Observed, options: FunctionOptions) -> int:
    """The replicas that carry the load at the target share, within the function's bounds."""
    least = max(options.scale_min, 1)
    if not options.scale_factor:
        # Scaling is switched off; only the bounds hold.
        return max(least, min(seen.wanted, options.scale_max))
    load = seen.rate if options.scale_type == "rps" else float(seen.inflight + seen.waiting)
    target = options.scale_target
    if options.scale_type != "rps" and options.concurrency is not None:
        # One instance takes no more calls than this: further calls wait for another instance.
        target = min(target, options.concurrency)
    carried = math.ceil(round(load / (target * options.scale_proportion), 9))
    return max(least, min(options.scale_max, carried))


def step_of(options: FunctionOptions) -> int:
    """How many replicas are added at once: a share of the maximum, as OpenFaaS does it."""
    return max(1, math.ceil(options.scale_max * options.scale_factor / _ALL_PERCENT))


def _from_zero(seen: Observed, options: FunctionOptions, past: Past, now_s: float) -> Decision:
    past = replace(past, fewer_since_s=math.inf)
    if not (seen.waiting or seen.queued):  # calls in flight have an instance until they end
        return Decision(0, past)
    return Decision(max(1, options.scale_min), replace(past, raised_at_s=now_s))


def _is_idle(seen: Observed, options: FunctionOptions, past: Past, now_s: float) -> bool:
    if not options.scale_zero or seen.busy:
        return False
    since_s = max(seen.last_call_s, past.busy_at_s, past.ready_at_s)
    return now_s - since_s >= options.scale_zero_after_s


def _up(
    seen: Observed, needed: int, options: FunctionOptions, past: Past, now_s: float
) -> Decision:
    past = replace(past, fewer_since_s=math.inf)
    if seen.wanted < options.scale_min:
        # Replicas below the minimum are added at once.
        return Decision(max(options.scale_min, 1), replace(past, raised_at_s=now_s))
    wait_s = _UP_EVERY_S if seen.available >= seen.wanted else _SETTLE_S
    if now_s - past.raised_at_s < wait_s:
        return Decision(seen.wanted, past)
    up = min(needed, seen.wanted + step_of(options))
    return Decision(up, replace(past, raised_at_s=now_s))


def _down(wanted: int, needed: int, past: Past, now_s: float) -> Decision:
    if past.fewer_since_s > now_s:
        return Decision(wanted, replace(past, fewer_since_s=now_s, most=needed))
    past = replace(past, most=max(past.most, needed))
    if now_s - past.fewer_since_s < _DOWN_AFTER_S:
        return Decision(wanted, past)
    return Decision(past.most, replace(past, fewer_since_s=math.inf))


@dataclass(slots=True)
class _FunctionScaling:
    """The state of one function between two looks."""

    past: Past = field(default_factory=Past)
    calls: deque[tuple[float, int]] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None
    # How many orders of others are being carried out.
    others: int = 0
    # The order that is not confirmed yet, and the last one.
    asked: int | None = None
    last: int | None = None
    believed_until_s: float = 0.0
    failures: int = 0
    not_before_s: float = 0.0
    woken_at_s: float | None = None
    # What the last look failed with, which is logged once.
    error: str = ""


@dataclass(eq=False)
class Scaler:
    """Orders replicas, one order at a time for each function; use it as a context.

    `queued` returns the number of a function's queued async calls. `now_s` is the clock of
    `Function.last_call_s`: time.monotonic. Functions are looked at every `every_s`.
    """

    functions: Functions
    scale: Scale
    queued: Callable[[FunctionId], int]
    now_s: Callable[[], float]
    log: Logger
    every_s: float = 1.0
    _hands: dict[FunctionId, _FunctionScaling] = field(default_factory=dict, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._tasks = BackgroundTasks(self.log, "the scaler")
        self._wakes = Histogram(metrics.WAKES)

    async def __aenter__(self) -> Self:
        self._tasks.start(self._watch(), name="scaler")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        orders = [hand.task for hand in self._hands.values() if hand.task is not None]
        for order in orders:
            order.cancel()
        await self._tasks.close()
        await asyncio.gather(*orders, return_exceptions=True)

    def wake(self, function: Function) -> None:
        """A call waits for a function that has no instance: start one at once."""
        self._look(function, self.now_s(), calling=True)

    @contextmanager
    def ordering(self, function: FunctionId) -> Iterator[None]:
        """Somebody deploys or scales this function: meanwhile the scaler removes no replica.

        Afterwards idleness and the wait for removing replicas begin anew.
        """
        hand = self._hands.get(function)
        if hand is None:  # of a function that is not known yet, all begins anew
            yield
            return
        hand.others += 1
        try:
            yield
        finally:
            hand.others -= 1
            hand.past = ordered(hand.past)
            hand.last = None

    def changed(self, function: Function) -> None:
        """The provider reported this function: note its replicas, or that it was removed."""
        hand = self._hands.get(function.id)
        if hand is None:
            return
        if function.gone:
            self._forget(function.id)
            return
        if function.wanted == hand.asked:
            hand.asked = None
        there = len(function.endpoints)
        hand.past = noticed(hand.past, function.wanted, there, self.now_s())
        self._awake(function, hand)

    def families(self, names: BoundedNames) -> Iterator[MetricFamily]:
        """`names` have numbers of their own."""
        wanted = [((names.of(function.label),), function.wanted) for function in self.functions]
        yield gauge(metrics.WANTED, wanted)
        yield self._wakes

    async def _watch(self) -> None:
        while True:
            self._look_at_all()
            await asyncio.sleep(self.every_s)

    def _look_at_all(self) -> None:
        now_s = self.now_s()
        ids = set()
        for function in self.functions:
            ids.add(function.id)
            self._look_apart(function, now_s)
        for function_id in [id_ for id_ in self._hands if id_ not in ids]:
            self._forget(function_id)

    def _look_apart(self, function: Function, now_s: float) -> None:
        """Decide for one function; an error is logged once, and the others are looked at still."""
        try:
            self._look(function, now_s)
        except Exception as error:
            hand = self._hands.setdefault(function.id, _FunctionScaling())
            if hand.error != repr(error):
                hand.error = repr(error)
                self.log.exception("%s is not scaled now", function.id)
        else:
            self._hands[function.id].error = ""

    def _look(self, function: Function, now_s: float, *, calling: bool = False) -> None:
        hand = self._hands.get(function.id)
        if hand is None:
            hand = self._hands[function.id] = _FunctionScaling()
        self._awake(function, hand)
        seen = self._observe(function, hand, now_s, calling=calling)
        if seen.busy and not seen.available and hand.woken_at_s is None:
            hand.woken_at_s = now_s
        if self._closed or hand.task is not None or now_s < hand.not_before_s:
            return
        replicas, hand.past = decide(seen, function.options, hand.past, now_s)
        said_already = replicas == hand.last and now_s < hand.believed_until_s
        against_others = hand.others > 0 and replicas < seen.wanted
        if replicas != seen.wanted and not said_already and not against_others:
            self._ask(function.id, hand, replicas, seen.wanted)

    def _observe(
        self, function: Function, hand: _FunctionScaling, now_s: float, *, calling: bool
    ) -> Observed:
        if hand.asked == function.wanted or now_s >= hand.believed_until_s:
            hand.asked = None
        return Observed(
            wanted=function.wanted if hand.asked is None else hand.asked,
            available=len(function.endpoints),
            inflight=function.inflight,
            waiting=max(function.waiting, int(calling)),
            queued=self.queued(function.id),
            rate=_rate(hand.calls, function.calls, now_s, _RATE_OVER_S),
            last_call_s=function.last_call_s,
        )

    def _ask(self, function: FunctionId, hand: _FunctionScaling, replicas: int, had: int) -> None:
        self.log.info("%s: %d replicas instead of %d", function, replicas, had)
        task = asyncio.create_task(self._scaled(function, replicas), name=f"scale {function}")
        hand.task = task

        def ended(task: asyncio.Task[None]) -> None:
            hand.task = None
            if task.cancelled():
                return
            error = task.exception()
            if error is None:
                hand.failures = 0
                hand.asked = hand.last = replicas
                hand.believed_until_s = self.now_s() + BELIEVED_S
            else:
                self._failed(function, hand, error)
            current = self.functions.by_id(function)
            if current is not None:
                # A call may have arrived while the function was being scaled to zero.
                self._look(current, self.now_s())

        task.add_done_callback(ended)

    async def _scaled(self, function: FunctionId, replicas: int) -> None:
        async with time_limit(SCALE_WITHIN_S):
            await self.scale(function, replicas)

    def _failed(self, function: FunctionId, hand: _FunctionScaling, error: BaseException) -> None:
        wait_s = min(_MOST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(hand.failures, 32))
        hand.failures += 1
        hand.not_before_s = self.now_s() + wait_s
        if isinstance(error, UnknownFunction):
            return  # the function was removed meanwhile; the listener is notified
        expected = isinstance(error, GatewayError | TimeoutError | OSError)
        why = _LATE if isinstance(error, TimeoutError) else error
        self.log.error(
            "%s could not be scaled: %s; next try in %g s",
            *(function, why, wait_s),
            exc_info=None if expected else error,
        )

    def _awake(self, function: Function, hand: _FunctionScaling) -> None:
        if hand.woken_at_s is not None and function.endpoints:
            self._wakes.add((), self.now_s() - hand.woken_at_s)
            hand.woken_at_s = None

    def _forget(self, function: FunctionId) -> None:
        hand = self._hands.pop(function)
        if hand.task is not None:
            hand.task.cancel()


def _rate(calls: deque[tuple[float, int]], total: int, now_s: float, over_s: float) -> float:
    """Calls a second over the last `over_s`; `calls` holds the totals of earlier looks."""
    if not calls or now_s > calls[-1][0]:
        calls.append((now_s, total))
    while len(calls) > 1 and calls[1][0] <= now_s - over_s:
        calls.popleft()
    first_s, first = calls[0]
    return max(0.0, (total - first) / (now_s - first_s)) if now_s > first_s else 0.0
