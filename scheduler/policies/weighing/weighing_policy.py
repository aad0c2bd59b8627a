"""A policy that weighs slots by a sum, and can say of what."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from scheduler.model.values import SlotId
from scheduler.policies.placement_policy import RequestView, View


class WeighedSlot(NamedTuple):
    """A slot that a policy weighed for a request: by name, the seconds that each term gains."""

    slot: SlotId
    terms: dict[str, float]


class WeighingPolicy(Protocol):
    """What a policy may have beside `Policy`."""

    def weighed(self, view: View, request: RequestView) -> Sequence[WeighedSlot]:
        """The slots that it weighs for this request, with the terms, as things stand.

        It is asked only for requests whose placement is explained, just before that.
        """
        ...
