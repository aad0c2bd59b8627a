"""Rows that compare native with ours, by rounds in which both take turns."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from bench.measure.function_orders import FunctionOrder, OrderResult
from bench.measure.function_process import (
    FunctionProcess,
)
from bench.measure.report import RESULTS, BenchReport

HEAD = """\
| measured | native | ours | compared | target | met |
| --- | ---: | ---: | ---: | ---: | --- |"""


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit in which figures of a row are shown."""

    name: str
    scale: float = 1.0
    digits: int = 1

    def show(self, value: float | None) -> str:
        """A figure with its unit."""
        return "" if value is None else f"{value * self.scale:,.{self.digits}f} {self.name}".strip()


US = Unit("µs", 1e6, 0)
MS = Unit("ms", 1e3, 1)
S = Unit("s", 1.0, 2)
RATE = Unit("calls/s", 1.0, 1)
RATIO = Unit("x", 1.0, 2)


@dataclass(slots=True)
class ComparisonRow:
    """One comparison: its value is the median of the rounds' values."""

    name: str
    value: float
    unit: Unit
    target: float | None = None
    native: float | None = None
    ours: float | None = None
    figures: Unit = MS
    rounds: list[float] = field(default_factory=list)
    more: dict[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the value is within its target, where it has one."""
        return None if self.target is None else self.value <= self.target

    def line(self) -> str:
        """A line of the table."""
        met = {None: "", True: "yes", False: "no"}[self.met]
        native, ours = self.figures.show(self.native), self.figures.show(self.ours)
        target = self.unit.show(self.target)
        return (
            f"| {self.name} | {native} | {ours} | {self.unit.show(self.value)} | {target} | {met} |"
        )


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of each comparison, and the seconds that a round may take."""

    count: int
    most_s: float


Compare = Callable[[float, float], float]


def extra(native_s: float, ours_s: float) -> float:
    """The seconds that ours takes longer."""
    return ours_s - native_s


def ratio(native: float, ours: float) -> float:
    """Ours divided by native."""
    return ours / native


def alternate(
    native: FunctionProcess, ours: FunctionProcess, order: FunctionOrder, rounds: Rounds
) -> list[tuple[OrderResult, OrderResult]]:
    """Give both the same order in turn, once to warm up and then once a round."""
    for child in (native, ours):
        child.ask(order)
    found = []
    for number in range(rounds.count):
        if number % 2:
            second, first = ours.ask(order), native.ask(order)
        else:
            first, second = native.ask(order), ours.ask(order)
        found.append((first, second))
    return found


def compared(
    name: str,
    pairs: Sequence[tuple[OrderResult, OrderResult]],
    compare: Compare,
    unit: Unit,
    target: float | None = None,
    figures: Unit = MS,
) -> ComparisonRow:
    """A row of timed calls: the median call of each round is compared within the round."""
    natives = [median(native.seconds) for native, _ in pairs]
    ours = [median(answer.seconds) for _, answer in pairs]
    values = [compare(one, other) for one, other in zip(natives, ours, strict=True)]
    row = ComparisonRow(
        name, median(values), unit, target, median(natives), median(ours), figures, values
    )
    calls = sum(answer.calls for _, answer in pairs)
    row.more = {
        "worker_compute_s": sum(answer.compute_s for _, answer in pairs) / calls,
        "worker_transfer_s": sum(answer.transfer_s for _, answer in pairs) / calls,
        "worker_queue_s": sum(answer.queue_s for _, answer in pairs) / calls,
    }
    return row


def report_rows(
    report: BenchReport, title: str, rows: Iterable[ComparisonRow], found: list[ComparisonRow]
) -> None:
    """A table, each line as soon as it is measured; the rows are appended to those found."""
    report.add(f"\n## {title}\n\n{HEAD}")
    for row in rows:
        report.add(row.line())
        found.append(row)


def keep_rows(facts: dict[str, object], rows: Iterable[ComparisonRow], markdown: Path) -> Path:
    """The rows as JSON, beside the Markdown file."""
    RESULTS.mkdir(exist_ok=True)
    path = markdown.with_suffix(".json")
    found = [
        asdict(row) | {"met": row.met, "unit": row.unit.name, "figures": row.figures.name}
        for row in rows
    ]
    path.write_text(json.dumps(facts | {"rows": found}, indent=1) + "\n", encoding="utf-8")
    return path
