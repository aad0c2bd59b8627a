"""The GPU manager's interfaces to the scheduler, in this process or another one."""

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
    """A node that carries out orders, and can report its whole state to a new scheduler."""

    def whole_state(self) -> Sequence[Event]:
        """Return a snapshot, and the events that must follow the snapshot."""


class Scheduling(NodeReports, Protocol):
    """The scheduler's interface for GPU managers."""

    @property
    def connected(self) -> bool: ...

    def attach(self, node: NodeId, link: OrderTaker) -> None:
        """Attach this node; its orders are passed to `link`."""

    def detach(self, node: NodeId) -> None: ...

    async def acquire(self, request: Request) -> Placement:
        """Wait for a lease; cancelling the task cancels the request."""

    async def wanted(self, request: RequestId) -> Placement:
        """Wait for another lease after one that was released with `may_return`."""

    def release(
        self, lease: LeaseId, request: RequestId | None = None, *, may_return: bool = False
    ) -> None:
        """Report a lease as released; with `may_return` its request may want another one.

        Of a lease that several requests share, only the named one releases it.
        """

    async def pin(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Keep a model on one GPU, or on every GPU where it is resident."""

    async def unpin(self, model: ModelId, gpu: GpuId | None = None) -> None: ...

    async def evict(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Remove a model from GPU memory where it is not in use."""

    async def locate(self, node: NodeId) -> tuple[str, ...]:
        """Return the addresses at which functions reach a node; none if it is unknown."""

    async def survey(self) -> Status:
        """Return the current counts and at least this node's GPUs."""
