"""Calls at a rate, whether they are answered or not, and figures of what became of them."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from bench.measure.load_figures import http_post, load_for
from gpufaas.load.arrivals import at_rate
from gpufaas.load.http_callers import target_at
from gpufaas.load.load_run import LoadOutcome, TrafficPlan, run
from gpufaas.load.statistics import latency
from scheduler.sim.simulation_tally import percentile
from scheduler.sim.workload import Arrivals, Pattern

# The parts and multiples of the capacity that are offered.
FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
_CLIENTS = 32
_TIMEOUT_S = 120.0
_OK, _BUSY = 200, 429
_SEED = 1
# A generator that begins its calls later than this, or has as many in flight as it has connections,
# offers less than it should.
_MOST_LATE_S = 0.05
_MOST_IN_FLIGHT = 4_000


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """What became of the calls at one rate; rates are calls a second, times are seconds.

    `late_s` is by how much the generator began its calls too late (99th percentile), `generator`
    the part of a core that it took.
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
    late_s: float
    generator: float
    most_in_flight: int

    @property
    def generator_kept_up(self) -> bool:
        """Whether the calls were begun when they were due."""
        return self.late_s <= _MOST_LATE_S and self.most_in_flight < _MOST_IN_FLIGHT


def capacity(url: str, path: str, seconds: float) -> float:
    """The calls a second that are answered to clients who wait for each answer."""
    return load_for(url, [http_post(path)], _CLIENTS, seconds).rate


def offer(url: str, path: str, factor: float, rate: float, seconds: float) -> OfferedLoad:
    """Call at this rate for these seconds, and wait for the last answer."""
    arrivals = at_rate([1.0], rate, seconds, Pattern(Arrivals.POISSON), _SEED)
    plan = TrafficPlan(
        target=target_at(url),
        functions=(path,),
        requests=[http_post(path)],
        seconds=seconds,
        timeout_s=_TIMEOUT_S,
        arrivals=arrivals,
    )
    most_in_flight = 0

    def watch(_outcome: LoadOutcome, in_flight: int) -> None:
        nonlocal most_in_flight
        most_in_flight = max(most_in_flight, in_flight)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(run(plan, asyncio.Event(), watch))
    return figures(outcome, factor, len(arrivals) / seconds, most_in_flight)


def figures(
    outcome: LoadOutcome, factor: float, offered: float, most_in_flight: int
) -> OfferedLoad:
    """The figures of a load that has ended."""
    tally, elapsed_s = outcome.tally, outcome.elapsed_s
    statuses = Counter(tally.status)
    good = [place for place, status in enumerate(tally.status) if status == _OK]
    times = latency(tally.latency_s[place] for place in good)
    return OfferedLoad(
        factor=factor,
        offered=offered,
        answered=statuses[_OK] / elapsed_s,
        refused=statuses[_BUSY] / elapsed_s,
        others={str(key): n for key, n in sorted(statuses.items()) if key not in {_OK, _BUSY}},
        p50_s=times.p50_s if times else 0.0,
        p95_s=times.p95_s if times else 0.0,
        p99_s=times.p99_s if times else 0.0,
        last_s=max((tally.due_s[place] + tally.latency_s[place] for place in good), default=0.0),
        late_s=percentile(sorted(outcome.late_s), 0.99),
        generator=outcome.cpu_s / elapsed_s,
        most_in_flight=most_in_flight,
    )


def least_goodput(loads: Sequence[OfferedLoad]) -> float:
    """The least rate of answers at the capacity or beyond it, as a share of the highest one."""
    peak = max((each.answered for each in loads), default=0.0)
    beyond = [each.answered for each in loads if each.factor >= 1]
    return min(beyond, default=0.0) / peak if peak else 0.0


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
