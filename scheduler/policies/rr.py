"""RR: requests go round all GPUs, idle or not, and wait there in order."""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.cluster.view import View
from scheduler.policies.placement_policy import Decision, Place, Queue


@dataclass(frozen=True, slots=True)
class Policy:
    """Round robin, Algorithm 4 of the thesis.

    How unclear points were read:
    - "Frequency" counts the requests a GPU was given, whether they ran yet or not; the order is
      computed again for each request, which for one arrival at a time is the loop of the text.
    - A request that comes to an idle GPU passes through its local queue, as the text has it.
    - A GPU that could never hold the request's models is left out of the round.
    """

    def decide(self, view: View) -> Iterator[Decision]:
        yield from spread(view)
        for slot in view.idle_slots():
            request = view.local_head(slot)
            if request is not None:
                yield Place((request,), slot, "head of the local queue")


def spread(view: View) -> Iterator[Decision]:
    """Move every waiting request to the local queue of the least used GPU."""
    while (request := view.first()) is not None:
        slot = view.least_used(request)
        if slot is None:
            return
        yield Queue(request, slot, "least used GPU")
