"""What is known of running calls of a program as one: whether they may be, and where it pays.

A program is watched alone first, then compared in every size, and merged where that was faster.
"""

import math
import operator
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_manager.worker.orders import CallsMerged, Singly

# Groups are of one of these sizes: libraries prepare kernels for each, and each is measured.
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
USUAL_MOST = SIZES[-1]
_COMPARISONS = 2  # of each size
_MARGIN = 0.95  # of the single calls' time that a group may take
_HOPELESS = 8.0  # times that long: not compared twice
_FIRST_REST, _LONGER = 256, 4  # groups that are not made before a size is compared again
_MOST_FAILURES = 3  # one after the other
_WEIGHT = 0.1  # of the newest time in a mean
_SUSPECT = 1.02  # of the single calls' time: a group that takes more is compared again
# Between two comparisons, times as long as the first of them: longer with each size that does not
# pay, so that where none does, comparisons have a hundredth of the time in the end.
PAUSES, _GROWTH, _MOST_PAUSES = 3.0, 1.5, 100.0
_MOST_RECORDS = 1024
_REPORT_S = 0.5  # between two reports
_MOST_NEVER = 256  # programs that are never merged, in one report
MOST_FORBIDDEN = 1024  # programs of a model; beyond them none is merged any more


class CannotMerge(Exception):
    """These calls cannot run as one, for a reason that their first run shows."""

    def __init__(self, why: Singly) -> None:
        super().__init__(why)
        self.why = why


class Plan(NamedTuple):
    """A group of this size; one that `compares` runs its calls singly as well."""

    size: int
    compares: bool


class Layout(NamedTuple):
    """An output that is a tensor, as a single call gave it; no strides where they have gaps."""

    dtype: object
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


class _Size:
    """What groups of one size took."""

    def __init__(self) -> None:
        self.compared = 0
        self.merged_s = self.singles_s = math.inf  # the least of the comparisons
        self.mean_s = 0.0
        self.failures = 0
        self.why_not = Singly.UNKNOWN
        self.rest = 0
        self._next_rest = _FIRST_REST

    @property
    def pays(self) -> bool:
        return self.compared >= _COMPARISONS and self.merged_s <= _MARGIN * self.singles_s

    def is_due(self) -> bool:
        """Whether it may be compared now; asked once for each group that could be made."""
        if self.rest:
            self.rest -= 1
        return not self.rest and self.compared < _COMPARISONS

    def note_compared(self, merged_s: float, singles_s: float) -> bool | None:
        """Whether the size pays; None if that takes another comparison."""
        self.compared += 1
        self.failures = 0
        self.merged_s = min(self.merged_s, merged_s)
        self.singles_s = min(self.singles_s, singles_s)
        self.mean_s = self.merged_s
        if not self.pays and (self.compared >= _COMPARISONS or merged_s > _HOPELESS * singles_s):
            self.give_up(Singly.SLOWER)
            return False
        return self.pays or None

    def note_merged(self, merged_s: float, size: int, single_s: float) -> bool | None:
        """False if groups seem to be slower than single calls now."""
        self.failures = 0
        self.mean_s += _WEIGHT * (merged_s - self.mean_s)
        if self.mean_s <= _SUSPECT * size * single_s:
            return None
        self._forget()
        return False

    def give_up(self, why: Singly) -> None:
        """Make no group of this size for a while, which grows."""
        self.why_not, self.rest = why, self._next_rest
        self._next_rest *= _LONGER
        self._forget()

    def _forget(self) -> None:
        self.compared = self.failures = 0
        self.merged_s = self.singles_s = math.inf


class MergeRecord:
    """One program with inputs of certain shapes, on one device."""

    def __init__(self) -> None:
        self.outputs: Sequence[Layout | object] | None = None  # of a single call, once one was seen
        self._single_s = 0.0
        self._sizes = {size: _Size() for size in SIZES}
        self.pauses = PAUSES
        self.rests_till_s = 0.0  # no comparison before then

    def plan(self, there: int, *, may_compare: bool = True) -> Plan | Singly:
        """The group to make of so many calls, or why there should be none."""
        if self.outputs is None:
            return Singly.UNKNOWN
        fitting = {size: group for size, group in self._sizes.items() if size <= there}
        paying = [size for size, group in fitting.items() if group.pays]
        best = min(paying, key=lambda size: fitting[size].mean_s / size, default=0)
        for size, group in reversed(fitting.items()) if may_compare else ():
            if size > max(paying, default=0) and group.is_due():
                return Plan(size, compares=True)
        if best:
            return Plan(best, compares=False)
        return max(fitting.items())[1].why_not if fitting else Singly.LEFT_OVER

    @property
    def pays(self) -> bool:
        """Whether groups of some size are faster than single calls."""
        return any(group.pays for group in self._sizes.values())

    def note_single(self, run_s: float) -> None:
        weight = _WEIGHT if self._single_s else 1.0
        self._single_s += weight * (run_s - self._single_s)

    def note_compared(self, size: int, merged_s: float, singles_s: float) -> None:
        """Groups are held against the latest single calls: a device becomes slower for both."""
        group = self._sizes.get(size)
        if group is not None:  # else some of its calls were refused
            self._single_s = singles_s / size
            self._pace(group.note_compared(merged_s, singles_s))

    def note_merged(self, size: int, merged_s: float) -> None:
        group = self._sizes.get(size)
        if group is not None:
            self._pace(group.note_merged(merged_s, size, self._single_s))

    def _pace(self, pays: bool | None) -> None:  # noqa: FBT001 - as its sizes say
        """The next comparisons follow sooner or later, unless nothing is known yet."""
        if pays is not None:
            pauses = self.pauses / _GROWTH if pays else self.pauses * _GROWTH
            self.pauses = min(max(pauses, PAUSES), _MOST_PAUSES)

    def note_short(self, size: int) -> None:
        """There was no memory for so many at once, nor for more."""
        for other, group in self._sizes.items():
            if other >= size:
                group.give_up(Singly.MEMORY)

    def note_failed(self, size: int) -> None:
        """A group that had run before failed: perhaps for one of its calls."""
        group = self._sizes.get(size)
        if group is not None:
            group.failures += 1
            if group.failures >= _MOST_FAILURES:
                group.give_up(Singly.FAILED)


@dataclass(slots=True)
class MergeCounts:
    """What became of the calls that could have been merged, since the model was loaded."""

    groups: int = 0
    calls: int = 0  # in these groups
    compared: int = 0
    singly: Counter[Singly] = field(default_factory=Counter)
    forbidden: dict[str, Singly] = field(default_factory=dict)  # never merged, by digest

    def forbid(self, digest: str, why: Singly) -> None:
        if len(self.forbidden) < MOST_FORBIDDEN:
            self.forbidden.setdefault(digest, why)

    def why_never(self, digest: str) -> Singly | None:
        full = Singly.TOO_MANY if len(self.forbidden) >= MOST_FORBIDDEN else None
        return self.forbidden.get(digest, full)


class MergeRecords:
    """The records of one model's programs; the least recently used leave if there are too many."""

    def __init__(self, make: type[MergeRecord] = MergeRecord) -> None:
        self._make = make
        self._records: OrderedDict[Hashable, MergeRecord] = OrderedDict()

    def of(self, likeness: Hashable) -> MergeRecord:
        record = self._records.get(likeness)
        if record is None:
            record = self._records[likeness] = self._make()
            if len(self._records) > _MOST_RECORDS:
                self._records.popitem(last=False)
        self._records.move_to_end(likeness)
        return record


class MergeSums:
    """Reports what was counted of calls that waited together, now and then."""

    def __init__(
        self, model: int, counts: MergeCounts, tell: Callable[[CallsMerged], None]
    ) -> None:
        self._model = model
        self._counts = counts
        self._tell = tell
        self._lock = threading.Lock()
        self._told_s = 0.0
        self._told = 0, 0, 0
        self._told_singly: Counter[Singly] = Counter()
        self._told_never = 0  # of the forbidden programs, which only become more

    def report(self, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._told_s <= _REPORT_S:
            return
        with self._lock:
            self._told_s = time.monotonic()
            counts = self._counts
            now = counts.groups, counts.calls, counts.compared
            # A copy first: another thread may be counting.
            singly, forbidden = Counter(dict(counts.singly)), list(dict(counts.forbidden).items())
            groups, calls, compared = map(operator.sub, now, self._told)
            more = singly - self._told_singly
            never = forbidden[self._told_never :]
            if not (groups or compared or more or never):
                return
            self._told, self._told_singly, self._told_never = now, singly, len(forbidden)
            some = dict(never[:_MOST_NEVER])
            self._tell(CallsMerged(self._model, groups, calls, compared, dict(more), some))
            for begin in range(_MOST_NEVER, len(never), _MOST_NEVER):
                some = dict(never[begin : begin + _MOST_NEVER])
                self._tell(CallsMerged(self._model, 0, 0, 0, {}, some))
