"""Clients in a closed loop, and the figures of what they saw; the generator of `gpufaas load`."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from statistics import median

import uvloop

from gpufaas.load.calling import address_of
from gpufaas.load.running import Outcome, Plan, run
from gpufaas.load.tally import Latency

_TIMEOUT_S = 30.0
_LONG_S = 600.0
_JSON = b'{"input": 1}'


@dataclass(frozen=True, slots=True)
class Figures:
    """What some calls came to; `generator` is the part of a core that the clients took."""

    rate: float
    p50_s: float
    p99_s: float
    failed: int
    generator: float


def request(path: str, more: str = "", body: bytes = _JSON) -> bytes:
    """A call as it is written."""
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def for_so_long(url: str, call: bytes, clients: int, seconds: float) -> Figures:
    """Clients that make the same call again and again."""
    return figures(_run(url, [call], clients, seconds, repeat(0)))


def all_of(url: str, calls: list[bytes], clients: int, chosen: Iterator[int]) -> Outcome:
    """Clients that share these calls, each of whom makes the next once it is answered."""
    return _run(url, calls, clients, _LONG_S, chosen)


def figures(outcome: Outcome) -> Figures:
    """Of the calls that were answered well, and how many were not."""
    found = outcome.tally.figures()
    times = found.latency or Latency(*repeat(float("nan"), 6))
    return Figures(
        rate=found.succeeded / outcome.elapsed_s,
        p50_s=times.p50_s,
        p99_s=times.p99_s,
        failed=found.calls - found.succeeded,
        generator=outcome.cpu_s / outcome.elapsed_s,
    )


def medians(runs: list[Figures]) -> Figures:
    """Of each figure on its own; failures are summed."""
    return Figures(
        rate=median(each.rate for each in runs),
        p50_s=median(each.p50_s for each in runs),
        p99_s=median(each.p99_s for each in runs),
        failed=sum(each.failed for each in runs),
        generator=median(each.generator for each in runs),
    )


def _run(
    url: str, calls: list[bytes], clients: int, seconds: float, chosen: Iterator[int]
) -> Outcome:
    plan = Plan(
        address=address_of(url),
        functions=tuple(str(number) for number in range(len(calls))),
        requests=calls,
        seconds=seconds,
        timeout_s=_TIMEOUT_S,
        clients=clients,
        choices=chosen,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(plan, asyncio.Event(), lambda _outcome, _in_flight: None))
