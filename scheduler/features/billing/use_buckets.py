"""What was used, by hours and days: added up exactly, bounded in number and size."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_manager.model.ids import GpuId, ModelId
from scheduler.features.billing.charges import CHARGES, KEPT, KEPT_FROM_OTHERS, NOBODY, Payer

HOUR_S = 3600
DAY_S = 86_400
# Of an hour or a day: what further functions and models use, or such with longer names, is charged
# to `others`, so that a record stays below the 1 MiB that a datastore takes.
MOST_ROWS = 1_000
_LONGEST_NAMES = 400
OTHERS = "(others)"
_OF_GPUS = 4  # slot time, idle slot time, bytes over time, unused bytes over time


class UseKey(NamedTuple):
    """Who used what: nobody, where `function` is empty; stored weights have no GPU type."""

    function: str
    model: ModelId
    gpu_type: str


class Period(NamedTuple):
    """An hour or a day, by its first second since 1970."""

    length_s: int
    begin_unix_s: int


@dataclass(slots=True)
class UseBucket:
    """What was charged in one period, and of each GPU type what there was and what was not used."""

    rows: dict[UseKey, list[int]] = field(default_factory=dict)
    gpus: dict[str, list[int]] = field(default_factory=dict)

    def charge(self, key: UseKey, amounts: Iterable[int]) -> None:
        full = len(self.rows) >= MOST_ROWS or sum(map(len, key)) > _LONGEST_NAMES
        if full and key not in self.rows:
            key = UseKey(OTHERS, ModelId(OTHERS), key.gpu_type)
        sums = self.rows.setdefault(key, [0] * CHARGES)
        _add(sums, amounts)
        for kept in (KEPT, KEPT_FROM_OTHERS):  # what is corrected may be of the hour before
            sums[kept] = max(0, sums[kept])

    def count(self, gpu_type: str, amounts: Iterable[int]) -> None:
        """Add what there was of GPUs of one type."""
        _add(self.gpus.setdefault(gpu_type, [0] * _OF_GPUS), amounts)

    def merge(self, other: "UseBucket") -> None:
        for key, amounts in other.rows.items():
            self.charge(key, amounts)
        for gpu_type, amounts in other.gpus.items():
            self.count(gpu_type, amounts)


class Collected(NamedTuple):
    """What was charged to one function for one model since the last collection.

    `gpu_type` is empty for weights in nodes' stores. Kept time may be below zero: a call ran in
    what was collected as kept before.
    """

    gpu: GpuId | None
    gpu_type: str
    function: str
    model: ModelId
    amounts: list[int]


class GpuSpan(NamedTuple):
    """A GPU's own account since the last collection: what there was of it, and what nobody used."""

    gpu: GpuId
    gpu_type: str
    slot_us: int
    idle_slot_us: int
    byte_us: int
    unused_byte_us: int


def take_charges(charged: list[Payer], gpu_type: str) -> list[Collected]:
    """What these payers were charged since the last collection; empties the list."""
    rows = [
        Collected(payer.gpu, gpu_type, payer.function, payer.model, payer.collect())
        for payer in charged
    ]
    charged.clear()
    return rows


class UseBuckets:
    """Hours for `keep_hours`, then the latest `keep_days` days; `changed` are to be written.

    Days are counted: a clock that is wrong for a moment does not make them old.
    """

    def __init__(self, keep_hours: float = 48.0, keep_days: float = 90.0) -> None:
        self._hours_s = max(1.0, keep_hours) * HOUR_S
        self._days = max(1, round(keep_days))
        self.of: dict[Period, UseBucket] = {}
        self.changed: dict[Period, None] = {}

    def add(self, rows: Iterable[Collected], spans: Iterable[GpuSpan], unix_s: float) -> None:
        """Count what was collected at this time in the present hour."""
        self.age(unix_s)
        period = Period(HOUR_S, int(unix_s) // HOUR_S * HOUR_S)
        bucket = self.of.setdefault(period, UseBucket())
        for row in rows:
            bucket.charge(UseKey(row.function, row.model, row.gpu_type), row.amounts)
        for span in spans:
            amounts = span.slot_us, span.idle_slot_us, span.byte_us, span.unused_byte_us
            bucket.count(span.gpu_type, amounts)
        self.changed[period] = None

    def age(self, unix_s: float) -> None:
        """Merge old hours into their days, and drop old days."""
        for period in [each for each in self.of if _ends(each) <= unix_s - self._hours_s]:
            if period.length_s == HOUR_S:
                day = Period(DAY_S, period.begin_unix_s // DAY_S * DAY_S)
                self.of.setdefault(day, UseBucket()).merge(self.of.pop(period))
                self.changed.update({day: None, period: None})
        days = sorted(each for each in self.of if each.length_s == DAY_S)
        for period in days[: -self._days]:
            del self.of[period]
            self.changed[period] = None

    def since(self, unix_s: float) -> Iterator[tuple[Period, UseBucket]]:
        """The periods that end after this time, the oldest first."""
        for period in sorted(self.of, key=_begins):
            if _ends(period) > unix_s:
                yield period, self.of[period]

    def latest_users(self) -> Mapping[ModelId, Sequence[str]]:
        """Who paid for each model in the latest period: its users, for all that is known."""
        users: dict[ModelId, list[str]] = {}
        if self.of:
            for key in self.of[max(self.of, key=_begins)].rows:
                functions = users.setdefault(key.model, [])
                if key.function not in {NOBODY, OTHERS} and key.function not in functions:
                    functions.append(key.function)
        return users


def _begins(period: Period) -> int:
    return period.begin_unix_s


def _ends(period: Period) -> int:
    return period.begin_unix_s + period.length_s


def _add(sums: list[int], amounts: Iterable[int]) -> None:
    for place, amount in enumerate(amounts):
        sums[place] += amount
