"""What the GPU manager needs of the scheduler, in this process or elsewhere."""

from collections.abc import Sequence
from typing import Protocol

from scheduler.api import (
    Event,
    GpuId,
    LeaseId,
    ModelId,
    NodeId,
    NodeLink,
    NodeReports,
    Placement,
    Request,
    RequestId,
    Status,
)


class OrderTaker(NodeLink, Protocol):
    """A node that takes orders, and can report its whole state to a new scheduler."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where functions find it."""
        ...

    def whole_state(self) -> Sequence[Event]:
        """A snapshot, and what has to be said after one."""
        ...


class Scheduling(NodeReports, Protocol):
    """The scheduler as a GPU manager sees it, in this process or elsewhere."""

    @property
    def connected(self) -> bool:
        """Whether it is reached at the moment."""
        ...

    def attach(self, node: NodeId, link: OrderTaker) -> None:
        """Give this node's orders to this link."""
        ...

    def detach(self, node: NodeId) -> None:
        """The node is gone."""
        ...

    async def acquire(self, request: Request) -> Placement:
        """Wait for a lease; cancelling the task cancels the request."""
        ...

    async def wanted(self, request: RequestId) -> Placement:
        """Wait for another lease after one that was released with `may_return`."""
        ...

    def release(self, lease: LeaseId, *, may_return: bool = False) -> None:
        """The holder of a lease needs it no more, or (with `may_return`) perhaps later again."""
        ...

    async def pin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Keep a model on one GPU, or wherever it is."""
        ...

    async def unpin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Let a pinned model be evicted again."""
        ...

    async def evict(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Take a model out of GPU memory where it is not in use."""
        ...

    async def survey(self) -> Status:
        """Counts, and at least this node's GPUs, as they are now."""
        ...


class Neighbours(Protocol):
    """The other nodes of a cluster, as far as a scheduler elsewhere has named them."""

    @property
    def term(self) -> int:
        """The highest term that was met."""
        ...

    def addresses_of(self, node: NodeId) -> tuple[str, ...]:
        """Where functions find that node; nothing where that was not said."""
        ...
