"""Calls at a rate, whether they are answered or not, and figures of what became of them."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import uvloop

from bench.load.arrivals import Arrival, at_rate
from bench.load.http_callers import REFUSALS, target_at
from bench.load.load_run import LoadOutcome, TrafficPlan, run
from bench.load.statistics import CallTally, latency
from bench.measure.load_figures import http_post, load_for, load_of
from scheduler.sim.simulation_tally import percentile
from scheduler.sim.workload import Arrivals, Pattern

# The parts and multiples of the capacity that are offered.
FACTORS = (0.5, 0.8, 1.0, 1.5, 2.0, 4.0)
_CLIENTS = 32
_TIMEOUT_S = 120.0
_OK = 200
# A generator that begins its calls later than this, or has as many in flight as it has connections,
# offers less than it should.
_MOST_LATE_S = 0.05
_MOST_IN_FLIGHT = 4_000


class CallKind(NamedTuple):
    """Calls of one function, workflow or tenant.

    They are `share` of the calls offered; with `steady` they come at this part of the capacity,
    whatever is offered. `weight` is their part of the GPUs; `limited` ones may be refused at any
    load, because a quota says so.
    """

    name: str
    path: str
    share: float = 1.0
    steady: float = 0.0
    weight: float = 1.0
    limited: bool = False


class OfferedAt(NamedTuple):
    """How calls are offered: for so long, by this seed."""

    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class KindFigures:
    """What became of the calls of one kind, in numbers of calls; seconds are of those answered."""

    name: str
    offered: int
    answered: int
    refused: int
    p50_s: float
    p99_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """What became of the calls at one rate; rates are calls a second, times are seconds.

    `refusal_s` is the time to a refusal (99th percentile), `hopeless` the number of refusals that
    did not say when to come again. `late_s` is by how much the generator began its calls too late
    (99th percentile), `generator` the part of a core that it took.
    """

    factor: float
    offered: float
    answered: float
    refused: float
    others: dict[str, int]
    p50_s: float
    p95_s: float
    p99_s: float
    last_s: float
    refusal_s: float
    hopeless: int
    late_s: float
    generator: float
    most_in_flight: int
    kinds: tuple[KindFigures, ...] = ()

    @property
    def generator_kept_up(self) -> bool:
        """Whether the calls were begun when they were due."""
        return self.late_s <= _MOST_LATE_S and self.most_in_flight < _MOST_IN_FLIGHT


def capacity(url: str, kinds: Sequence[CallKind], seconds: float) -> float:
    """The calls a second that are answered to clients who wait for each answer."""
    return load_for(url, [http_post(each.path) for each in kinds], _CLIENTS, seconds).rate


def call_each(url: str, kinds: Sequence[CallKind], calls: int) -> None:
    """Have one client call every kind so many times, so that nothing is a first call."""
    order = (number for _ in range(calls) for number in range(len(kinds)))
    load_of(url, [http_post(each.path) for each in kinds], 1, order)


def arrivals_of(
    kinds: Sequence[CallKind], most: float, factor: float, how: OfferedAt
) -> list[Arrival]:
    """Poisson arrivals of all kinds, the same for a seed; `most` is the capacity."""
    found: list[Arrival] = []
    pattern = Pattern(Arrivals.POISSON)
    whole = sum(each.share for each in kinds if not each.steady)
    for number, kind in enumerate(kinds):
        part = kind.steady or factor * kind.share / whole
        seed = how.seed + number
        times = at_rate([1.0], part * most, how.seconds, pattern, seed)
        found += [(at_s, number) for at_s, _ in times]
    return sorted(found)


def offer(
    url: str, kinds: Sequence[CallKind], most: float, factor: float, how: OfferedAt
) -> OfferedLoad:
    """Call at this multiple of the capacity, and wait for the last answer."""
    arrivals = arrivals_of(kinds, most, factor, how)
    most_in_flight = hopeless = 0

    def watch(_outcome: LoadOutcome, in_flight: int) -> None:
        nonlocal most_in_flight
        most_in_flight = max(most_in_flight, in_flight)

    def refused(_kind: int, _status: int, retry_after: str) -> None:
        nonlocal hopeless
        hopeless += not (retry_after.isdecimal() and int(retry_after) >= 1)

    plan = TrafficPlan(
        target=target_at(url),
        functions=tuple(each.name for each in kinds),
        requests=[http_post(each.path) for each in kinds],
        seconds=how.seconds,
        timeout_s=_TIMEOUT_S,
        arrivals=arrivals,
        on_refusal=refused,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(run(plan, asyncio.Event(), watch))
    return figures(outcome, factor, how.seconds, most_in_flight, hopeless)


def figures(
    outcome: LoadOutcome, factor: float, seconds: float, most_in_flight: int, hopeless: int
) -> OfferedLoad:
    """The figures of a load that was offered for these seconds, and has ended."""
    tally, elapsed_s = outcome.tally, outcome.elapsed_s
    statuses = Counter(tally.status)
    good = [place for place, status in enumerate(tally.status) if status == _OK]
    bad = [place for place, status in enumerate(tally.status) if status in REFUSALS]
    times = latency(tally.latency_s[place] for place in good)
    others = {key: n for key, n in sorted(statuses.items()) if key not in {_OK, *REFUSALS}}
    return OfferedLoad(
        factor=factor,
        offered=len(tally) / seconds,
        answered=len(good) / elapsed_s,
        refused=len(bad) / elapsed_s,
        others={str(key): n for key, n in others.items()},
        p50_s=times.p50_s if times else 0.0,
        p95_s=times.p95_s if times else 0.0,
        p99_s=times.p99_s if times else 0.0,
        last_s=max((tally.due_s[place] + tally.latency_s[place] for place in good), default=0.0),
        refusal_s=percentile(sorted(tally.latency_s[place] for place in bad), 0.99) if bad else 0.0,
        hopeless=hopeless,
        late_s=percentile(sorted(outcome.late_s), 0.99),
        generator=outcome.cpu_s / elapsed_s,
        most_in_flight=most_in_flight,
        kinds=tuple(_kind_figures(tally, number) for number in range(len(tally.functions))),
    )


def _kind_figures(tally: CallTally, number: int) -> KindFigures:
    own = [place for place, function in enumerate(tally.function) if function == number]
    good = [tally.latency_s[place] for place in own if tally.status[place] == _OK]
    times = latency(good)
    return KindFigures(
        name=tally.functions[number],
        offered=len(own),
        answered=len(good),
        refused=sum(tally.status[place] in REFUSALS for place in own),
        p50_s=times.p50_s if times else 0.0,
        p99_s=times.p99_s if times else 0.0,
        longest_s=times.max_s if times else 0.0,
    )


def refusal_cost_s(loads: Sequence[OfferedLoad], spent: Sequence[float]) -> tuple[float, float]:
    """The gateway's processor seconds of an answered and of a refused call.

    `spent` is the part of a core that the gateway took in each load. The loads without refusals
    give the cost of an answer; the load with most refusals gives the rest.
    """
    quiet = [(each, cores) for each, cores in zip(loads, spent, strict=True) if not each.refused]
    busy, busy_cores = max(zip(loads, spent, strict=True), key=lambda pair: pair[0].refused)
    if not quiet or not busy.refused:
        return float("nan"), float("nan")
    answer_s = sum(cores for _, cores in quiet) / sum(each.answered for each, _ in quiet)
    return answer_s, (busy_cores - answer_s * busy.answered) / busy.refused
