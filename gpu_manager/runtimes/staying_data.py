"""A node on which functions put no data with workers."""

from gpu_manager.runtimes.runtime import HostedModel, LentData, PutByWorker


class NoStayingData:
    """Knows no data: no worker has any, and none is lent."""

    async def rescue(self, hosted: HostedModel) -> None:
        """Nothing: no worker has any."""

    def handed_over(self, hosted: HostedModel, handle: str, *, done: bool) -> None:
        """Nothing: none was asked for."""

    def was_put(self, hosted: HostedModel, put: PutByWorker) -> None:
        """None is kept: nothing was granted."""
        hosted.withdraw(put.handle)

    def grant_left(self, hosted: HostedModel, size_bytes: int, pieces: int) -> None:
        """Nothing: nothing was granted."""

    def wanted(self, hosted: HostedModel, handle: str) -> None:
        """There is none."""
        hosted.borrowed(handle, None)

    def lent(self, hosted: HostedModel, handle: str, lent: LentData | None) -> None:
        """Nothing: none was asked for."""

    def given_back(self, hosted: HostedModel, handle: str) -> None:
        """Nothing: none was lent."""
