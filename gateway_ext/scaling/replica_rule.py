"""The rule for the number of a function's replicas; pure."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from gateway_ext.openfaas.function_options import FunctionOptions

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
    seen: Observed,
    needed: int,
    options: FunctionOptions,
    past: Past,
    now_s: float,
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
