"""A policy for tests only: batches that take all idle slots of a GPU, and some of its vCPUs."""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.cluster.view import View
from scheduler.model.values import Configuration
from scheduler.policies.placement_policy import Decision, Place

MOST_TOGETHER = 3
_MOST_VCPUS = 3


@dataclass(frozen=True)
class WidePolicy:
    """The first requests go together to the least used idle slot, and all others of its GPU."""

    def decide(self, view: View) -> Iterator[Decision]:
        for slot in view.idle_slots():
            head = view.local_head(slot) or view.head(slot)
            if head is None:
                continue
            local = view.local_head(slot) is not None
            batch = (head,) if local else tuple(view.waiting_like(head, MOST_TOGETHER))
            room = view.room(slot)
            more = tuple(each for each in room.idle if each is not slot)
            vcpus = min(_MOST_VCPUS, room.free_vcpus)
            configuration = Configuration(len(batch), vcpus, 1 + len(more))
            yield Place(batch, slot, "all of it", configuration, more)
