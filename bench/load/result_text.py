"""A load's outcome as text and as JSON, and a line of progress while it runs."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bench.load.load_run import LoadOutcome
from bench.load.statistics import CacheCounts, CallFigures, Latency
from scheduler.sim.simulation_tally import percentile

_LATE_S = 0.01
_BUSY = 0.9
_MOST_REASONS = 5


class ProgressLine:
    """A line of progress on standard error, if that is a terminal."""

    def __init__(self, *, wanted: bool) -> None:
        self.shown = wanted and sys.stderr.isatty()
        self.cache: CacheCounts | None = None
        self._seen = 0
        self._seen_s = 0.0

    def update(self, outcome: LoadOutcome, in_flight: int, now_s: float) -> None:
        """Redraw the line with the calls that ended since the last time."""
        if not self.shown or now_s == self._seen_s:
            return
        good, failed = outcome.tally.latest(self._seen)
        rate = (len(good) + failed) / (now_s - self._seen_s) if self._seen_s else 0.0
        self._seen, self._seen_s = len(outcome.tally), now_s
        ratio = None if self.cache is None else self.cache.hit_ratio
        text = f"\r{rate:,.0f} calls/s, {in_flight} in flight, {failed} failed"
        text += f", p50 {ms(percentile(good, 0.5))}, p99 {ms(percentile(good, 0.99))}"
        text += "" if ratio is None else f", hit ratio {ratio:.3f}"
        print(f"{text}\033[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Erase the line."""
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def as_json(outcome: LoadOutcome, cache: CacheCounts | None, picture: str | None) -> dict[str, Any]:
    """The outcome as the documented object."""
    tally = outcome.tally
    counted = None if cache is None else asdict(cache) | {"hit_ratio": cache.hit_ratio}
    return {
        "elapsed_s": outcome.elapsed_s,
        "stopped": outcome.stopped,
        "unfinished": tally.unfinished,
        **_figures(tally.figures(), outcome.elapsed_s),
        "reasons": dict(tally.reasons.most_common()),
        "functions": {
            name: _figures(found, outcome.elapsed_s) for name, found in tally.by_function().items()
        },
        "cache": counted,
        "generator": {
            "late_p99_s": percentile(sorted(outcome.late_s), 0.99),
            "cpu": outcome.cpu_s / outcome.elapsed_s,
        },
        "picture": picture,
    }


def result_text(outcome: LoadOutcome, cache: CacheCounts | None) -> str:
    """The outcome as text."""
    return "\n".join(_lines(outcome, cache))


def ms(seconds: float) -> str:
    """A time with its unit."""
    return f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _figures(found: CallFigures, elapsed_s: float) -> dict[str, Any]:
    return {
        "calls": found.calls,
        "succeeded": found.succeeded,
        "throughput": found.succeeded / elapsed_s,
        "statuses": found.statuses,
        "latency": None if found.latency is None else asdict(found.latency),
    }


def _lines(outcome: LoadOutcome, cache: CacheCounts | None) -> Iterator[str]:
    tally = outcome.tally
    everything = tally.figures()
    stopped = ", stopped" if outcome.stopped else ""
    unfinished = f", {tally.unfinished} had not ended" if tally.unfinished else ""
    yield (
        f"{everything.calls:,} calls in {outcome.elapsed_s:.1f} s{stopped}{unfinished}: "
        f"{everything.succeeded / outcome.elapsed_s:,.1f} answered well a second"
    )
    yield f"answers: {', '.join(f'{n:,} x {code}' for code, n in everything.statuses.items())}"
    for reason, count in tally.reasons.most_common(_MOST_REASONS):
        yield f"  {count:,} x {reason}"
    yield ""
    yield from _table({**tally.by_function(), "all": everything})
    if cache is not None:
        ratio = "no lease" if cache.hit_ratio is None else f"hit ratio {cache.hit_ratio:.3f}"
        yield ""
        yield f"GPUs: {ratio} ({cache.hits} hits, {cache.misses} misses), {cache.evictions} evicted"
    yield from _warnings(outcome)


def _table(rows: dict[str, CallFigures]) -> Iterator[str]:
    width = max(len(name) for name in ("function", *rows))
    yield f"{'function':<{width}}{'calls':>9}{'failed':>8}" + "".join(
        f"{name:>11}" for name in ("p50", "p90", "p95", "p99", "longest", "average")
    )
    for name, row in rows.items():
        failed = row.calls - row.succeeded
        yield f"{name:<{width}}{row.calls:>9,}{failed:>8,}{_times(row.latency)}"


def _times(latency: Latency | None) -> str:
    if latency is None:
        return f"{'-':>11}" * 6
    found = (latency.p50_s, latency.p90_s, latency.p95_s, latency.p99_s)
    return "".join(f"{ms(each):>11}" for each in (*found, latency.max_s, latency.average_s))


def _warnings(outcome: LoadOutcome) -> Iterator[str]:
    """Reasons why the figures may be wrong."""
    late_s = percentile(sorted(outcome.late_s), 0.99)
    if late_s > _LATE_S:
        yield f"This generator began calls up to {ms(late_s)} late (p99): the machine is too busy."
    busy = outcome.cpu_s / outcome.elapsed_s
    if busy > _BUSY:
        yield f"This generator used {busy:.0%} of a core: it may be what limits the rate."
