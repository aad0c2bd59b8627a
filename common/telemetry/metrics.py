"""Metrics: declared once, counted in plain dicts, written as Prometheus reads them; pure."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

# The label value of every name beyond the bound.
OTHER = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]


class MetricKind(StrEnum):
    """What Prometheus may do with the numbers."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    UNTYPED = "untyped"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric as it is documented; `name` is what is written, a counter's ends in `_total`.

    `bounds` are the upper bounds of a histogram's buckets, without the last, which has none.
    """

    name: str
    kind: MetricKind
    help_text: str
    labels: Labels = ()
    bounds: tuple[float, ...] = ()


class Values:
    """A counter or gauge: one number for each set of labels."""

    __slots__ = ("metric", "values")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        # A metric without labels begins at 0: Prometheus would read its absence as an error.
        self.values: dict[Labels, float] = {} if metric.labels else {(): 0.0}

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        values = self.values
        values[labels] = values.get(labels, 0.0) + amount

    def put(self, labels: Labels, value: float) -> None:
        self.values[labels] = value

    def forget(self, label: str, name: str) -> None:
        at = self.metric.labels.index(label)
        for labels in [labels for labels in self.values if labels[at] == name]:
            del self.values[labels]

    def lines(self) -> Iterator[str]:
        metric = self.metric
        for labels, value in sorted(self.values.items()):
            shown = _braced(_pairs(metric.labels, labels))
            yield f"{metric.name}{shown} {float(value)!r}"


class BucketCounts:
    """A histogram's numbers for one set of labels."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, number: float) -> None:
        self.counts[bisect_left(self.bounds, number)] += 1
        self.total += number


class Histogram:
    """How often a number was in which range, for each set of labels."""

    __slots__ = ("metric", "_shown", "_times")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        # As numbers with a point: what Prometheus makes of them, from its third version on.
        self._shown = (*(f'le="{float(bound)!r}"' for bound in metric.bounds), 'le="+Inf"')
        self._times: dict[Labels, BucketCounts] = {}
        if not metric.labels:
            self._times[()] = BucketCounts(metric.bounds)

    def of(self, labels: Labels) -> BucketCounts:
        """The buckets of these labels; valid until the labels are forgotten."""
        times = self._times.get(labels)
        if times is None:
            times = self._times[labels] = BucketCounts(self.metric.bounds)
        return times

    def add(self, labels: Labels, number: float) -> None:
        self.of(labels).add(number)

    def pooled(self, metric: Metric) -> "Histogram":
        """The same without labels, under another name."""
        histogram = Histogram(metric)
        pool = histogram.of(())
        for times in self._times.values():
            pool.counts = [
                count + more for count, more in zip(pool.counts, times.counts, strict=True)
            ]
            pool.total += times.total
        return histogram

    def counts(self) -> Iterator[tuple[Labels, Sequence[int]]]:
        return ((labels, times.counts) for labels, times in self._times.items())

    def forget(self, label: str, name: str) -> None:
        at = self.metric.labels.index(label)
        for labels in [labels for labels in self._times if labels[at] == name]:
            del self._times[labels]

    def lines(self) -> Iterator[str]:
        """Buckets that add up, the number of all, and their sum."""
        name = self.metric.name
        for labels, times in sorted(self._times.items()):
            pairs = _pairs(self.metric.labels, labels)
            before = f"{name}_bucket{{{pairs}," if pairs else f"{name}_bucket{{"
            number = 0
            for shown, count in zip(self._shown, times.counts, strict=True):
                number += count
                yield f"{before}{shown}}} {float(number)!r}"
            yield f"{name}_count{_braced(pairs)} {float(number)!r}"
            yield f"{name}_sum{_braced(pairs)} {times.total!r}"


MetricFamily = Values | Histogram


class BoundedNames:
    """The values of one label, bounded: the first `most` names, and `other` for the rest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sweeps = 0
        self._used: dict[str, int] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._used))

    def of(self, name: str) -> str:
        """The name itself, or `other`."""
        used = self._used.get(name)
        if used is None and len(self._used) >= self._most:
            return OTHER
        if used != self._sweeps:
            self._used[name] = self._sweeps
        return name

    def sweep(self) -> list[str]:
        """Forget names that were not used since the last sweep, and return them."""
        idle = [name for name, used in self._used.items() if used < self._sweeps]
        for name in idle:
            del self._used[name]
        self._sweeps += 1
        return idle

    def forget(self, name: str) -> None:
        """Give this name's place to another."""
        self._used.pop(name, None)


def gauge(metric: Metric, values: Iterable[tuple[Labels, float]]) -> Values:
    """A gauge of present values; the values of equal labels are added up."""
    family = Values(metric)
    for labels, value in values:
        family.add(labels, value)
    return family


def counted_in(counts: object) -> list[Values | Histogram]:
    """Every metric that is an attribute of this object."""
    return [value for value in vars(counts).values() if isinstance(value, Values | Histogram)]


def page(families: Iterable[MetricFamily]) -> bytes:
    lines: list[str] = []
    for family in families:
        metric = family.metric
        lines.append(f"# HELP {metric.name} {_escaped(metric.help_text)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines += family.lines()
    lines.append("")
    return "\n".join(lines).encode()


def _pairs(names: Sequence[str], labels: Labels) -> str:
    return ",".join(f'{name}="{_quoted(value)}"' for name, value in zip(names, labels, strict=True))


def _braced(pairs: str) -> str:
    return f"{{{pairs}}}" if pairs else ""


def _quoted(value: str) -> str:
    """A label's value; the most are written as they are."""
    if "\\" in value or '"' in value or "\n" in value:
        return _escaped(value).replace('"', '\\"')
    return value


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
