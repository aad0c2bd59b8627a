"""Replicas that all run the same, as many as are wanted of them."""

from collections.abc import Iterable
from typing import Generic

from gateway_ext.model import Endpoint
from gateway_ext.providers.replica import I, Replica, Watch


class Replicas(Generic[I]):
    """One version's; the first ones may run already."""

    def __init__(self, watch: Watch[I], running: Iterable[I] = ()) -> None:
        self._watch = watch
        self.replicas = [Replica(watch, one) for one in running]

    def resize(self, wanted: int) -> list[Replica[I]]:
        """Has this many replicas; gives those that are too many, which get no new call."""
        while len(self.replicas) < wanted:
            self.replicas.append(Replica(self._watch))
        leaving = sorted(self.replicas, key=lambda replica: replica.ready)
        leaving = leaving[: len(self.replicas) - wanted]
        for replica in leaving:
            self.replicas.remove(replica)
            replica.leave()
        return leaving

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where it can be called now."""
        return [r.instance.endpoint for r in self.replicas if r.ready and r.instance is not None]

    @property
    def instances(self) -> list[I]:
        """Those that live, ready or not."""
        return [r.instance for r in self.replicas if r.instance is not None]

    @property
    def trouble(self) -> str:
        """What is amiss with one of them, if anything is."""
        return next((replica.trouble for replica in self.replicas if replica.trouble), "")
