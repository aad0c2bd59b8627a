"""What one worker holds for this process, as the process remembers it."""

from collections.abc import Sequence


class Kept:
    """The storages that one worker holds for this session, by key: our epoch of each, and its."""

    def __init__(self) -> None:
        self.epochs: dict[int, tuple[int, int]] = {}
        self.sent: dict[int, int] = {}

    def result(self, key: int, epoch: int) -> None:
        """The worker keeps a result under this key, as its epoch 0."""
        self.epochs[key] = (epoch, 0)

    def forget(self, keys: Sequence[int]) -> None:
        """The worker has let these go."""
        for key in keys:
            self.epochs.pop(key, None)
