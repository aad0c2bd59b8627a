"""Clients in a closed loop, by the generator of `bench.load`: figures of calls, and answers."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat
from statistics import median

import uvloop

from bench.load.http_callers import OnAnswer, target_at
from bench.load.load_run import LoadOutcome, TrafficPlan, run
from bench.load.statistics import Latency

_TIMEOUT_S = 30.0
_LONG_S = 600.0
_JSON = b'{"input": 1}'


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The figures of some calls; `generator` is the part of a core that the clients took."""

    rate: float
    p50_s: float
    p99_s: float
    failed: int
    generator: float


def http_post(path: str, more: str = "", body: bytes = _JSON) -> bytes:
    """The bytes of a POST request; `more` is further header lines."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def load_for(
    url: str,
    calls: list[bytes],
    clients: int,
    seconds: float,
    on_answer: OnAnswer | None = None,
) -> LoadFigures:
    """Clients that go round these calls until the time is over."""
    return figures_of(_run(url, calls, clients, seconds, cycle(range(len(calls))), on_answer))


def load_of(url: str, calls: list[bytes], clients: int, chosen: Iterator[int]) -> LoadOutcome:
    """Clients that share the calls chosen; each client makes the next call once it is answered."""
    return _run(url, calls, clients, _LONG_S, chosen)


def figures_of(outcome: LoadOutcome) -> LoadFigures:
    """The figures of the calls that succeeded, and the number of those that did not."""
    found = outcome.tally.figures()
    times = found.latency or Latency(*repeat(float("nan"), 6))
    return LoadFigures(
        rate=found.succeeded / outcome.elapsed_s,
        p50_s=times.p50_s,
        p99_s=times.p99_s,
        failed=found.calls - found.succeeded,
        generator=outcome.cpu_s / outcome.elapsed_s,
    )


def medians(runs: Sequence[LoadFigures]) -> LoadFigures:
    """The median of each figure on its own; failures are summed."""
    return LoadFigures(
        rate=median(each.rate for each in runs),
        p50_s=median(each.p50_s for each in runs),
        p99_s=median(each.p99_s for each in runs),
        failed=sum(each.failed for each in runs),
        generator=median(each.generator for each in runs),
    )


def _run(
    url: str,
    calls: list[bytes],
    clients: int,
    seconds: float,
    chosen: Iterator[int],
    on_answer: OnAnswer | None = None,
) -> LoadOutcome:
    plan = TrafficPlan(
        target=target_at(url),
        functions=tuple(str(number) for number in range(len(calls))),
        requests=calls,
        seconds=seconds,
        timeout_s=_TIMEOUT_S,
        clients=clients,
        choices=chosen,
        on_answer=on_answer,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(plan, asyncio.Event(), lambda _outcome, _in_flight: None))
