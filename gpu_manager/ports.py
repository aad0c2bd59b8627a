"""What the GPU manager needs of the scheduler, in this process or elsewhere."""

from typing import Protocol

from scheduler.api import (
    GpuId,
    ModelId,
    NodeId,
    NodeLink,
    Placement,
    Reports,
    Request,
    Status,
)


class Scheduling(Reports, Protocol):
    """The scheduler as a GPU manager sees it, in this process or elsewhere."""

    def attach(self, node: NodeId, link: NodeLink) -> None:
        """Give this node's orders to this link."""
        ...

    def detach(self, node: NodeId) -> None:
        """The node is gone."""
        ...

    async def acquire(self, request: Request) -> Placement:
        """Wait for a lease; cancelling the task cancels the request."""
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

    def status(self) -> Status:
        """Everything as it is now."""
        ...
