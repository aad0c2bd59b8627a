"""Samples a running stack every few seconds, from a thread of its own."""

import threading
import time
from collections import defaultdict
from typing import NamedTuple, Self

from bench.measure.whole_stack import WholeStack
from gpufaas.errors import CommandError
from hunt.soak.part_samples import TreeSample, sample_tree
from hunt.soak.soak_growth import SeriesPoint
from hunt.soak.table_samples import addresses_of, sample_tables

_MIB = 1 << 20
# What is not told from noise within the judged half: an allocator's step; two of anything counted.
_BYTES_RESOLUTION, _COUNT_RESOLUTION = 1.0 * _MIB, 2.0

_SHOWN = {
    "rss_bytes": "resident bytes",
    "pss_bytes": "proportional bytes",
    "private_bytes": "private bytes",
}
# Memory that others share comes and goes with them; what a part itself holds is its private memory,
# and what it shares by files in memory is counted of all parts together.
_SHARED = frozenset({"resident bytes", "proportional bytes"})
# These follow the load: they rise while it is more than is answered, and must be 0 in the end.
_OF_THE_LOAD = frozenset(
    {
        *("calls in flight", "calls waiting", "jobs queued", "waiting requests"),
        *("workflows running", "bytes of workflows"),
    }
)


class SeriesName(NamedTuple):
    """A part of the stack, and what of it is followed."""

    part: str
    what: str

    @property
    def resolution(self) -> float:
        """Growth below this within the judged half is not told from none."""
        return _BYTES_RESOLUTION if self.is_bytes else _COUNT_RESOLUTION

    @property
    def is_bytes(self) -> bool:
        """Whether it is an amount of memory."""
        return "bytes" in self.what

    @property
    def is_of_the_load(self) -> bool:
        """Whether it rises while the load is more than is answered."""
        return self.what in _OF_THE_LOAD

    @property
    def is_judged(self) -> bool:
        """Whether the part itself is to blame for its growth."""
        return self.what not in _SHARED and not self.is_of_the_load

    def shown(self, value: float) -> str:
        """A value of it, with its unit."""
        return f"{value / _MIB:,.1f} MiB" if self.is_bytes else f"{value:,.1f}"


Series = dict[SeriesName, list[SeriesPoint]]


class SoakSampler:
    """Follows every part as long as the context lasts; `missed` says why a sample is lacking."""

    def __init__(self, running: WholeStack, every_s: float) -> None:
        self.series: Series = defaultdict(list)
        self.missed: list[str] = []
        self.began_s = time.monotonic()
        self._running = running
        self._every_s = every_s
        self._addresses = addresses_of(running)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stopping.wait(self._every_s):
            at_s = time.monotonic() - self.began_s
            try:
                found = values_of(sample_tree(self._running.pid))
                for (part, what), value in sample_tables(self._running, self._addresses).items():
                    found[SeriesName(part, what)] = value
            except (CommandError, OSError, ValueError) as error:
                self.missed.append(f"after {at_s:.0f} s: {type(error).__name__}: {error}")
                continue
            for name, value in found.items():
                self.series[name].append(SeriesPoint(at_s, value))


def values_of(tree: TreeSample) -> dict[SeriesName, float]:
    """What is followed of the processes of every part, and of all of them together."""
    found: dict[SeriesName, float] = {}
    for part, sample in tree.parts.items():
        for field, value in sample._asdict().items():
            found[SeriesName(part, _SHOWN.get(field, field))] = float(value)
    found[SeriesName("all", "files in memory")] = float(tree.memfds)
    found[SeriesName("all", "bytes of files in memory")] = float(tree.memfd_bytes)
    return found
