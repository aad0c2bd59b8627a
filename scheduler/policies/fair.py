"""FAIR: namespaces take turns by their weights; among requests whose turn it is, as NETGAIN."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from scheduler.cluster.view import View
from scheduler.policies import netgain
from scheduler.policies.placement_policy import Decision, check_bounds


@dataclass(frozen=True, slots=True)
class Policy:
    """Weighted shares of GPU time, by virtual time with a bounded look ahead (MQFQ-Sticky's idea).

    Requests wait with their namespace until its turn is at most `lead_s` later than the first turn,
    in seconds of the whole cluster's work; NETGAIN places those. So it has hits to choose from, and
    a namespace that floods the queue delays others by no more than that. While slots are idle, also
    some are placed whose turn comes later: others use what a namespace leaves of its share. Where
    memory is needed, models of namespaces that have more than their part of it leave first.
    """

    lead_s: Annotated[float, "how much later than the first turn a request may have its own"] = 1.0

    def __post_init__(self) -> None:
        check_bounds("fair", self)

    def decide(self, view: View) -> Iterator[Decision]:
        return netgain.Policy().decide(view)
