"""LB: the least used idle GPU takes the request that arrived first."""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.cluster.view import View
from scheduler.policies.placement_policy import Decision, Place


@dataclass(frozen=True, slots=True)
class Policy:
    """Load balance, Algorithm 5 of the thesis.

    How unclear points were read:
    - "Sorted by frequency": by how many requests each GPU was given, fewest first, ties to the
      lowest id. A GPU that joins starts at the lowest count present, or it would be flooded.
    - A GPU too small for the head takes the first request that it has room for.
    """

    def decide(self, view: View) -> Iterator[Decision]:
        for slot in view.idle_slots():
            request = view.head(slot)
            if request is not None:
                yield Place((request,), slot, "first in the queue to the least used idle GPU")
