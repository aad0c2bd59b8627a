"""How urgent a load is: a prefetch becomes urgent when a request begins to wait for it."""

from collections.abc import Callable

from gpu_manager.transfers.transfer_schedule import TransferRank


class LoadUrgency:
    """The rank of one load's transfers. It is changed by one thread; any may read it."""

    def __init__(self, *, ahead: bool = False) -> None:
        """`ahead`: no request waits for the load."""
        self.rank = TransferRank.BACKGROUND if ahead else TransferRank.AWAITED
        self._listeners: list[Callable[[TransferRank], None]] = []

    @property
    def is_ahead(self) -> bool:
        """Whether nobody waits."""
        return self.rank is TransferRank.BACKGROUND

    def listen(self, listener: Callable[[TransferRank], None]) -> None:
        """Have this called when the rank changes."""
        self._listeners.append(listener)

    def ignore(self, listener: Callable[[TransferRank], None]) -> None:
        """Call this one no more."""
        self._listeners.remove(listener)

    def hurry(self) -> None:
        """A request waits from now on."""
        if self.is_ahead:
            self.rank = TransferRank.AWAITED
            for listener in list(self._listeners):
                listener(self.rank)
