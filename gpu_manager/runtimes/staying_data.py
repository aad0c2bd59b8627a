"""What a node needs to know of the data that functions put with its workers."""

from typing import Protocol

from gpu_manager.runtimes.runtime import HostedModel


class StayingData(Protocol):
    """The data of functions whose bytes only workers have."""

    async def rescue(self, hosted: HostedModel) -> None:
        """Bring what only this model's worker has to safety: the model is about to leave."""

    def handed_over(self, hosted: HostedModel, handle: str, *, done: bool) -> None:
        """Data was copied from a worker, or is not there."""


class NoStayingData:
    """A node on which functions put no data."""

    async def rescue(self, hosted: HostedModel) -> None:
        """Nothing: no worker has any."""

    def handed_over(self, hosted: HostedModel, handle: str, *, done: bool) -> None:
        """Nothing: none was asked for."""
