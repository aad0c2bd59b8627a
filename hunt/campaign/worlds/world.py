"""What the campaign needs of a running system, and what a fault is."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Generic, Protocol, TypeVar

from hunt.campaign.judging.call_journal import Kind
from hunt.campaign.judging.leftovers import Holdings
from tests.kit.waiting import PATIENCE_S

NOBODY: frozenset[Kind] = frozenset()
STREAMS = frozenset({Kind.STREAM})
EVERYBODY = frozenset(Kind)

Heal = Callable[[], None]

_LOOK_S = 0.2


class World(Protocol):
    """A system that is up; `work` is where its functions note the calls that they begin."""

    name: str
    work: Path

    @property
    def url(self) -> str:
        """Where its gateway answers."""
        ...

    @property
    def host(self) -> str:
        """The address at which its gateway reaches us."""
        ...

    def inside(self) -> AbstractContextManager[None]:
        """Have this thread, and those that it starts, on the system's network."""
        ...

    def restore(self) -> None:
        """Start again what nobody else does, and wait until it is whole."""
        ...

    def holdings(self) -> Holdings:
        """What it holds now."""
        ...

    def processes(self) -> Mapping[int, str]:
        """Every process of it, with its command."""
        ...

    def logs(self) -> Sequence[Path]:
        """What its parts have written."""
        ...

    def wrong(self) -> list[str]:
        """What its own logs say that may not be."""
        ...


AnyWorld = TypeVar("AnyWorld", bound=World)


@dataclass(frozen=True)
class Fault(Generic[AnyWorld]):
    """Something that is done to a world, and undone after a time within one of the spans.

    Chance takes the span. Calls of `breaks` may break off meanwhile: what is broken holds their
    connections.
    """

    name: str
    inflict: Callable[[AnyWorld, Random], Heal]
    spans_s: Sequence[tuple[float, float]] = ((0.0, 0.0),)
    breaks: frozenset[Kind] = NOBODY

    def held_s(self, rng: Random) -> float:
        """How long it lasts this time."""
        return rng.uniform(*rng.choice(self.spans_s))


def healed() -> None:
    """Nothing has to be undone."""


def holds_in_time(holds: Callable[[], bool], within_s: float) -> bool:
    """Whether it held in time; seldom enough that looking does not keep the processor busy."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_S)
    return True


def wait_seldom(holds: Callable[[], bool], what: str) -> None:
    """Wait for what many processes have to be looked at for; AssertionError if it comes never."""
    assert holds_in_time(holds, PATIENCE_S), f"not within {PATIENCE_S:g} s: {what}"
