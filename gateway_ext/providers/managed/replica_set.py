"""Replicas of one version of a function, as many as are wanted."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic

from gateway_ext.model import Deployment, Endpoint, SlowStart
from gateway_ext.providers.managed.replica import I, Replica, ReplicaContext


class ReplicaSet(ABC, Generic[I]):
    """Replicas that run the same; `running` are instances to begin with."""

    def __init__(self, context: ReplicaContext, running: Iterable[I] = ()) -> None:
        self._context = context
        self.replicas = [Replica(context, self._make, one) for one in running]

    @property
    @abstractmethod
    def deployment(self) -> Deployment:
        """The deployment that they run."""

    @abstractmethod
    async def _make(self) -> I:
        """Start another instance."""

    def add(self) -> Replica[I]:
        """Start another replica."""
        self.replicas.append(Replica(self._context, self._make))
        return self.replicas[-1]

    @property
    def outdated(self) -> list[Replica[I]]:
        """Replicas that serve, and whose instances would serve better if they were started now."""
        return []

    def resize(self, wanted: int) -> list[Replica[I]]:
        """Change the number of replicas; returns the surplus ones, which get no new call."""
        while len(self.replicas) < wanted:
            self.add()
        leaving = sorted(self.replicas, key=lambda replica: replica.ready)
        leaving = leaving[: len(self.replicas) - wanted]
        for replica in leaving:
            self.replicas.remove(replica)
            replica.leave()
        return leaving

    @property
    def endpoints(self) -> list[Endpoint]:
        """Endpoints of the replicas that are ready."""
        return [r.instance.endpoint for r in self.replicas if r.ready and r.instance is not None]

    @property
    def instances(self) -> list[I]:
        """Instances that are alive, ready or not."""
        return [r.instance for r in self.replicas if r.instance is not None]

    @property
    def trouble(self) -> str:
        """The problem of one replica; empty if there is none."""
        return next((replica.trouble for replica in self.replicas if replica.trouble), "")

    @property
    def dying(self) -> str:
        """How instances of one replica end again and again; empty if none do."""
        return next((replica.dying for replica in self.replicas if replica.dying), "")

    @property
    def slow(self) -> SlowStart | None:
        """A start that takes long; None if there is none."""
        return next((replica.slow for replica in self.replicas if replica.slow), None)

    @property
    def broken(self) -> str:
        """Why none of its replicas starts, or need be waited for; empty while one may serve."""
        return self.partly_broken if all(replica.broken for replica in self.replicas) else ""

    @property
    def partly_broken(self) -> str:
        """Why one replica does not start; empty if there is none."""
        return next((replica.broken for replica in self.replicas if replica.broken), "")
