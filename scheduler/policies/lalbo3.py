"""LALBO3: idle GPUs take hits first, out of order; a hit on a busy GPU may be worth waiting for."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Annotated

from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import View
from scheduler.model.errors import BadParameter
from scheduler.policies.placement_policy import Decision, Place, Queue, Skip


@dataclass(frozen=True, slots=True)
class Policy:
    """Locality-aware load balance with out-of-order dispatch, Algorithms 7 and 8 of the thesis.

    How unclear points were read:
    - "Visits higher than the limit" is read as "at the limit or higher", since a limit of 0 must
      mean no passing over at all (section 4.4, and the comment at Algorithm 7's head).
    - A visit is one idle GPU that passed the request over in the first scan, whether that scan
      then found a hit or not.
    - Of several idle GPUs that hold the models the least used one is taken (ties: lowest id), as
      the lists are "sorted by frequency"; of several busy ones the one that is free soonest. As it
      is printed, the loop takes the first one that is free soon enough: only studies set that.
    - "Another idle GPU" may have a local queue that it has not begun on yet: the hit goes there all
      the same, and overtakes what waits in that queue, by one run.
    - "The finish time is less than the loading time": the time until the busy GPU could begin the
      request (Algorithm 2's FinishTime and its local queue) against the load on the idle GPU;
      the inference itself is the same on both sides.
    - A model that no GPU holds may have left a process with a context on an idle one (staged exit,
      which the thesis does not have): it goes there.
    - "Frequency" counts the requests a GPU was given, through its local queue or directly.
    """

    o3_limit: Annotated[int, "how often a request may be passed over by hits; 0 is LALB"] = 25

    def __post_init__(self) -> None:
        if self.o3_limit < 0:
            raise BadParameter("lalbo3", "o3_limit", f"must be 0 or more, not {self.o3_limit}")

    def decide(self, view: View) -> Iterator[Decision]:
        return decide(view, self.o3_limit)


def decide(view: View, limit: int) -> Iterator[Decision]:
    """Algorithm 7 with this O3 limit."""
    for slot in view.idle_slots():
        waiting_here = view.local_head(slot)
        if waiting_here is not None:
            yield Place((waiting_here,), slot, "waited for this GPU in its local queue")
        else:
            yield from _serve(view, slot, limit)


def _serve(view: View, slot: Slot, limit: int) -> Iterator[Decision]:
    """The first scan in two parts (requests at the limit come first in the queue), then another."""
    while (head := view.head(slot)) is not None and view.visits_reached(head, limit):
        if slot.holds(head.models):
            yield Place((head,), slot, "hit on this idle GPU")
            return
        placed_here = yield from _balance(view, slot, head)
        if placed_here:
            return
    if head is None:
        return
    hit = view.first_hit(slot)
    if hit is not head:
        yield Skip(hit, limit)
    if hit is not None:
        yield Place((hit,), slot, "hit on this idle GPU")
        return
    while (head := view.head(slot)) is not None:
        placed_here = yield from _balance(view, slot, head)
        if placed_here:
            return


def _balance(view: View, slot: Slot, request: Pending) -> Generator[Decision, None, bool]:
    """Algorithm 8; true if the request went to this slot."""
    other = view.idle_holder(request)
    if other is not None:
        yield Place((request,), other, "hit on another idle GPU")
        return False
    busy = view.busy_holder(request)
    if busy is None:
        keeper = next(iter(view.idle_keepers(request)), slot)
        if keeper is not slot:
            yield Place((request,), keeper, "cached nowhere; another idle GPU keeps its process")
            return False
        yield Place((request,), slot, "cached nowhere")
        return True
    if view.wait_s(busy) < view.load_s(request, slot):
        yield Queue(request, busy, "hit on a busy GPU, sooner than a load here")
        return False
    yield Place((request,), slot, "a load here is sooner than the busy GPUs that hold it")
    return True
