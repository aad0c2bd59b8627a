"""The generated parts of docs/evaluation/streambox.md: tables, and headlines beside the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from bench.streambox.equal_memory import CallRate
from bench.streambox.footprint import Footprint
from bench.streambox.functions import CONTEXT_BYTES, SMALL_CONTEXT_BYTES
from bench.streambox.offered_load import LoadResult
from cache_manager.model.ids import MIB
from common.gpu_wishes import PROCESS, STREAM

_RUNTIMES = (PROCESS, STREAM)
_NEAR = 0.9  # of the paper's figure


@dataclass(slots=True)
class StreamboxFigures:
    """All that was measured, by runtime and number of functions."""

    command: str
    machine: str
    gpu_mib: int
    footprints: dict[tuple[str, int], Footprint] = field(default_factory=dict)
    rates: dict[tuple[str, int], list[CallRate]] = field(default_factory=dict)
    loads: dict[tuple[str, str, int], LoadResult] = field(default_factory=dict)

    def memory_factor(self, count: int) -> float:
        """How often the memory of streams goes into that of processes."""
        alone, shared = (self.footprints[runtime, count] for runtime in _RUNTIMES)
        return alone.granted_bytes / shared.granted_bytes

    def factor_of_small_context(self, count: int) -> float:
        """The same, had a process the smaller context: the ledger counts it once a process."""
        alone, shared = (self.footprints[runtime, count] for runtime in _RUNTIMES)
        less_bytes = CONTEXT_BYTES - SMALL_CONTEXT_BYTES
        return (alone.granted_bytes - alone.processes * less_bytes) / (
            shared.granted_bytes - shared.processes * less_bytes
        )

    def rate_factor(self, count: int) -> float:
        """Calls a second of streams over those of processes, round by round; the median."""
        pairs = zip(self.rates[STREAM, count], self.rates[PROCESS, count], strict=True)
        return median(shared.calls_per_s / alone.calls_per_s for shared, alone in pairs)

    def beyond_weights(self, count: int) -> float:
        """Memory for each function beyond weights, in contexts."""
        found = self.footprints[STREAM, count]
        return (found.granted_bytes - found.weights_bytes) / count / CONTEXT_BYTES


class Headline(NamedTuple):
    """A figure of StreamBox, or a goal of ours, and what we have; `most` where less is better."""

    text: str
    theirs: float
    ours: float
    unit: str
    most: bool = False

    @property
    def distance(self) -> float:
        return self.ours / self.theirs

    @property
    def verdict(self) -> str:
        gain = 1 / self.distance if self.most else self.distance
        if gain >= 1:
            return "reached"
        return "near" if gain >= _NEAR else "not"


def headlines(figures: StreamboxFigures) -> list[Headline]:
    """The README's two, the abstract's two, and a goal of ours."""
    most = max(count for _, count in figures.footprints)
    fewer, more = sorted({count for _, count in figures.rates})
    factor = figures.memory_factor(most)
    return [
        Headline(f"README: memory of {most} functions, times less", 8.0, factor, "×"),
        Headline(f"abstract: memory of {most} functions less by", 82.0, 100 - 100 / factor, "%"),
        Headline(
            f"README: calls/s at equal memory, {fewer} functions",
            2.2,
            figures.rate_factor(fewer),
            "×",
        ),
        Headline(
            f"abstract: calls/s at equal memory, {more} functions",
            6.7,
            figures.rate_factor(more),
            "×",
        ),
        Headline(
            f"goal: memory of a function beyond weights, of a context, {most} functions",
            5.0,
            100 * figures.beyond_weights(most),
            "%",
            most=True,
        ),
    ]


def streambox_blocks(figures: StreamboxFigures) -> Mapping[str, str]:
    """The text of each part of the page."""
    return {
        "summary": _summary(figures),
        "headlines": _table(
            ("headline", "theirs", "ours", "distance", "verdict"),
            [
                (
                    each.text,
                    f"{each.theirs:g} {each.unit}",
                    f"{each.ours:.3g} {each.unit}",
                    f"× {each.distance:.2f}",
                    each.verdict,
                )
                for each in headlines(figures)
            ],
        ),
        "memory": _memory(figures),
        "rates": _rates(figures),
        "loads": _loads(figures),
    }


def _summary(figures: StreamboxFigures) -> str:
    verdicts = [each.verdict for each in headlines(figures)]
    reached = verdicts.count("reached")
    return (
        f"Measured by `{figures.command}`: {figures.machine}.\n"
        f"Headlines: {len(verdicts)}, of which {reached} reached, {verdicts.count('near')} near, "
        f"{verdicts.count('not')} not. The GPU is emulated."
    )


def _memory(figures: StreamboxFigures) -> str:
    rows = []
    for count in sorted({count for _, count in figures.footprints}):
        alone, shared = (figures.footprints[runtime, count] for runtime in _RUNTIMES)
        rows.append(
            (
                str(count),
                *(f"{found.granted_bytes / MIB:.0f}" for found in (alone, shared)),
                f"{figures.memory_factor(count):.1f}",
                f"{figures.factor_of_small_context(count):.1f}",
                *(_beyond_mib(found, count) for found in (alone, shared)),
                f"{shared.calls_bytes / count / MIB:.1f}",
                *(f"{found.anonymous_bytes / count / MIB:.1f}" for found in (alone, shared)),
            )
        )
    head = ["functions", "GPU, process", "GPU, stream", "times less", "with 414 MiB"]
    head += ["beyond weights, process", "beyond weights, stream", "a call takes"]
    return _table([*head, "machine, process", "machine, stream"], rows)


def _beyond_mib(found: Footprint, count: int) -> str:
    return f"{(found.granted_bytes - found.weights_bytes) / count / MIB:.1f}"


def _rates(figures: StreamboxFigures) -> str:
    rows = []
    for count in sorted({count for _, count in figures.rates}):
        for runtime in _RUNTIMES:
            found = figures.rates[runtime, count]
            times = f"{figures.rate_factor(count):.1f}" if runtime == STREAM else ""
            rows.append(
                (
                    str(count),
                    runtime,
                    f"{median(each.calls_per_s for each in found):.1f}",
                    times,
                    f"{median(each.hit_ratio for each in found):.3f}",
                    f"{1000 * median(each.p99_s for each in found):.0f} ms",
                )
            )
    return _table(
        ("functions", "runtime", "calls/s", "times", "hit ratio", "99th percentile"), rows, left=2
    )


def _loads(figures: StreamboxFigures) -> str:
    rows = [
        (
            load,
            runtime,
            str(count),
            str(found.offered),
            f"{100 * found.ended / found.offered:.0f} %",
            f"{found.calls_per_s:.1f}",
            f"{1000 * found.median_s:.0f} ms",
            f"{1000 * found.p99_s:.0f} ms",
            f"{found.mean_bytes / MIB:.0f}",
            f"{found.peak_bytes / MIB:.0f}",
        )
        for (load, runtime, count), found in figures.loads.items()
    ]
    head = ("load", "runtime", "functions", "calls", "ended in time", "calls/s", "median")
    return _table((*head, "99th percentile", "GPU MiB, mean", "GPU MiB, most"), rows, left=2)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    marks = ["---"] * left + ["---:"] * (len(head) - left)
    lines = [head, marks, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
