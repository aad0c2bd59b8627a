"""LALB: locality-aware load balance, strictly in order."""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.cluster.view import View
from scheduler.policies import lalbo3
from scheduler.policies.placement_policy import Decision


@dataclass(frozen=True, slots=True)
class Policy:
    """Algorithms 7 and 8 with an O3 limit of 0; see `lalbo3` for how they were read."""

    def decide(self, view: View) -> Iterator[Decision]:
        return lalbo3.decide(view, 0)
