"""This process's record of the storages that one worker keeps for the process."""

from collections.abc import Sequence

Content = tuple[int, int]


class WorkerStorages:
    """The storages that one worker keeps for this session, by key.

    An entry has the epoch and version of this process's storage when both copies were equal, and
    the worker's epoch.
    """

    def __init__(self) -> None:
        self.epochs: dict[int, tuple[Content, int]] = {}
        self.sent: dict[int, Content] = {}

    def result(self, key: int, content: Content) -> None:
        """Record that the worker keeps a result under this key, with epoch 0."""
        self.epochs[key] = (content, 0)

    def forget(self, keys: Sequence[int]) -> None:
        """Record that the worker no longer keeps the storages with these keys."""
        for key in keys:
            self.epochs.pop(key, None)
