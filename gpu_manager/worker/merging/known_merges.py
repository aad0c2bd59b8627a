"""What is known of merging one model's calls on one kind of device, as it outlives a worker.

Pure. Between worker and manager a record is a row of numbers; neither believes the other's.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

MOST_KNOWN = 256  # records of one model on one kind of device
MOST_FORBIDDEN = 1024  # programs of a model; beyond them none is merged any more
_LARGEST = 1 << 40  # of the counts and seconds in a record
_PARTS = 7  # of a size, behind the size itself
NAME_DIGITS = 64
_HEXADECIMAL = frozenset("0123456789abcdef")


class KnownSize(NamedTuple):
    """What groups of one size took; the least of `compared` comparisons, and their running mean.

    No such group is made for the next `rest` chances, and then for `next_rest` where it does not
    pay again; `why` numbers the reason.
    """

    size: int
    compared: int
    merged_s: float
    singles_s: float
    mean_s: float
    rest: int
    next_rest: int
    why: int


class KnownRecord(NamedTuple):
    """One program with inputs of certain shapes; `name` is a digest of all that it depends on."""

    name: str
    single_s: float
    sizes: tuple[KnownSize, ...]

    def row(self) -> list[float]:
        """The record without its name, as it travels."""
        return [self.single_s, *(float(part) for each in self.sizes for part in each)]

    @classmethod
    def of_row(cls, name: str, row: Sequence[Any]) -> Self:
        """Read a record that a worker or a file has; ValueError unless it can be one."""
        if not is_name(name):
            raise ValueError(f"{name!r:.80} is no digest")
        width = 1 + _PARTS
        if not row or len(row) % width != 1 or len(row) > 1 + width * NAME_DIGITS:
            raise ValueError(f"a record of {len(row)} numbers")
        for number in row:
            if not isinstance(number, float) or not 0 <= number < _LARGEST:
                raise ValueError(f"{number!r:.40} in a record")
        parts = [row[at : at + width] for at in range(1, len(row), width)]
        return cls(name, row[0], tuple(_size(*each) for each in parts))


def is_name(text: str) -> bool:
    """Whether this can be the name of a record, or a program's digest."""
    return len(text) == NAME_DIGITS and not set(text) - _HEXADECIMAL


def _size(
    size: float,
    compared: float,
    merged_s: float,
    singles_s: float,
    mean_s: float,
    rest: float,
    next_rest: float,
    why: float,
) -> KnownSize:
    whole = size, compared, rest, next_rest, why
    if any(number != math.floor(number) for number in whole):
        raise ValueError(f"a count that is not whole among {whole}")
    times = merged_s, singles_s, mean_s
    return KnownSize(int(size), int(compared), *times, int(rest), int(next_rest), int(why))


@dataclass(slots=True, eq=False)
class KnownMerges:
    """One model on one kind of device: records by name, and the programs that are never merged.

    The records that were learned longest ago leave where there are too many. No program leaves
    `never`: where there are too many, nothing of the model is merged (`is_closed`).
    """

    model: str = ""
    device: str = ""
    never: dict[str, str] = field(default_factory=dict)
    records: dict[str, KnownRecord] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        """Whether so many programs must not be merged that none is."""
        return len(self.never) >= MOST_FORBIDDEN

    def copy(self) -> "KnownMerges":
        """All of it as it is now, for another thread."""
        return KnownMerges(self.model, self.device, dict(self.never), dict(self.records))

    def forbid(self, never: Iterable[tuple[str, str]]) -> bool:
        """Add programs, each with its reason; return whether one of them is news."""
        before = len(self.never)
        for digest, why in never:
            if not self.is_closed:
                self.never.setdefault(digest, why)
        return len(self.never) > before

    def learn(self, records: Iterable[KnownRecord]) -> None:
        """Take over records, which are newer than those here."""
        for record in records:
            self.records.pop(record.name, None)
            self.records[record.name] = record
        while len(self.records) > MOST_KNOWN:
            del self.records[next(iter(self.records))]
