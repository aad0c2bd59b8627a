"""RRO3: round robin whose local queues let cache hits go first."""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.cluster.view import View
from scheduler.policies.placement_policy import Decision, Place
from scheduler.policies.rr import spread


@dataclass(frozen=True, slots=True)
class Policy:
    """Round robin out of order, Algorithm 6 of the thesis.

    How unclear points were read:
    - The text gives RRO3 no limit on how often a request may be passed over (section 4.5 names
      one only with visits, which Algorithm 6 does not count): there is none.
    - It names no bound on how far it looks into a local queue either. Looking at the first two or
      three requests alone gives gains nearer to the thesis's: only studies set such a `window`.
    - Everything else is as in `rr`.
    """

    def decide(self, view: View) -> Iterator[Decision]:
        yield from spread(view)
        for slot in view.idle_slots():
            hit = view.local_hit(slot)
            request = hit or view.local_head(slot)
            if request is not None:
                rule = "hit in the local queue" if hit else "head of the local queue, no hit"
                yield Place((request,), slot, rule)
