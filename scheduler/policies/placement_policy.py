"""What a policy may decide, and the bounds of its parameters."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import View
from scheduler.model.errors import BadParameter
from scheduler.model.values import Configuration, SlotId


# Decisions are classes where they are made for every placement: made fastest, compiled.
class Place:
    """Give these requests of the same models to a slot with room, now.

    Those of another function than the first one go on waiting: they cannot share its lease.
    Their lease occupies `more_slots` with room on the same GPU too, and has what vCPUs the
    configuration says, if the GPU's manager takes one.
    Or load what they lack `beside` the runs of a slot that is loadable: their lease takes the GPU's
    copy engine at once, and the slot's compute when the models are there; meanwhile the slot serves
    others.
    """

    def __init__(
        self,
        requests: Sequence[Pending],
        slot: Slot,
        rule: str,
        configuration: Configuration | None = None,
        more_slots: Sequence[Slot] = (),
        *,
        beside: bool = False,
    ) -> None:
        self.requests = requests
        self.slot = slot
        self.rule = rule
        self.configuration = configuration
        self.more_slots = more_slots
        self.beside = beside


class Queue:
    """Let a request wait for this one slot."""

    def __init__(self, request: Pending, slot: Slot, rule: str) -> None:
        self.request = request
        self.slot = slot
        self.rule = rule


class Skip:
    """Count one visit of every waiting request before `before` (of all, where it is None)."""

    def __init__(self, before: Pending | None, limit: int) -> None:
        self.before = before
        self.limit = limit


class Prefetch(NamedTuple):
    """Load a model onto an idle slot ahead of its requests."""

    model: ModelId
    slot: Slot


class Wake(NamedTuple):
    """Run the policy again at this time, even if nothing has happened."""

    at_s: float


Decision = Place | Queue | Skip | Prefetch | Wake


class Policy(Protocol):
    """Which request goes where; its fields are its parameters, the core keeps its state."""

    def decide(self, view: View) -> Iterator[Decision]:
        """Decisions in order; each is carried out before the next one is requested."""


class WeighedSlot(NamedTuple):
    """A slot that a policy weighed for a request: by name, the seconds that each term gains.

    A policy that has `weighed(view, request)` returns these, as things stand: it is asked only for
    requests whose placement is explained, just before that.
    """

    slot: SlotId
    terms: dict[str, float]


def check_bounds(policy: str, chosen: Any, *from_one: str) -> None:
    """Raise BadParameter if a parameter of the policy is below 0, or one of these below 1."""
    for field in fields(chosen):
        if getattr(chosen, field.name) < 0:
            raise BadParameter(policy, field.name, "must be 0 or more")
    for name in from_one:
        if getattr(chosen, name) < 1:
            raise BadParameter(policy, name, "must be 1 or more")
