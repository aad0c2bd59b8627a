"""What a soak found of each part: flat, growing by so much, or not told from noise; pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hunt.soak.soak_growth import SeriesGrowth
from hunt.soak.soak_sampler import SeriesName

Growths = Mapping[SeriesName, SeriesGrowth | None]

_MEMORY = "private bytes"
HEAD = (
    "| part | verdict | memory an hour (interval) | grows | not told from noise |\n"
    "| --- | --- | --- | --- | --- |"
)


class PartVerdict(NamedTuple):
    """One part: the growth of its memory, what grows, and what may, for all that is known."""

    part: str
    memory: SeriesGrowth | None
    grown: Mapping[SeriesName, SeriesGrowth]
    noisy: Sequence[SeriesName]
    judged: int

    @property
    def text(self) -> str:
        """The verdict in a word or two."""
        if self.grown:
            return "**grows**"
        if not self.judged:
            return "not judged"
        return "flat as far as is told" if self.noisy else "flat"

    @property
    def row(self) -> str:
        """The verdict as a row of the table."""
        name = SeriesName(self.part, _MEMORY)
        memory = "" if self.memory is None else with_interval(name, self.memory)
        grown = ", ".join(
            f"{one.what} {with_interval(one, found)}" for one, found in self.grown_in_order
        )
        noisy = ", ".join(one.what for one in self.noisy)
        return f"| {self.part} | {self.text} | {memory} | {grown or '-'} | {noisy or '-'} |"

    @property
    def grown_in_order(self) -> Sequence[tuple[SeriesName, SeriesGrowth]]:
        """What grows, by name."""
        return sorted(self.grown.items())


def verdicts_of(growths: Growths) -> list[PartVerdict]:
    """The verdict on each part that was sampled, in the order of their names."""
    return [_verdict(part, growths) for part in sorted({name.part for name in growths})]


def overloaded(growths: Growths) -> list[str]:
    """What says that the load was more than was answered: queues that grew all the while."""
    return [
        f"{name.part}: {name.what} {with_interval(name, found)}"
        for name, found in sorted(growths.items(), key=lambda item: item[0])
        if found is not None and found.grows and name.is_of_the_load
    ]


def with_interval(name: SeriesName, growth: SeriesGrowth) -> str:
    """The growth in an hour, with the bounds of what it may be."""
    low, high = name.shown(growth.low_per_h), name.shown(growth.high_per_h)
    return f"{name.shown(growth.per_h)} ({low} to {high})"


def _verdict(part: str, growths: Growths) -> PartVerdict:
    found = {
        name: growth
        for name, growth in growths.items()
        if name.part == part and name.is_judged and growth is not None
    }
    return PartVerdict(
        part=part,
        memory=found.get(SeriesName(part, _MEMORY)),
        grown={name: growth for name, growth in found.items() if growth.grows},
        noisy=sorted(
            name for name, growth in found.items() if not (growth.grows or growth.is_flat)
        ),
        judged=len(found),
    )
