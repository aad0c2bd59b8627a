"""What one worker holds for this process, as the process remembers it."""

from collections.abc import Sequence

Content = tuple[int, int]


class WorkerStorages:
    """The storages that one worker holds for this session, by key: what told their content when
    they agreed (epoch and version here), and the worker's epoch."""

    def __init__(self) -> None:
        self.epochs: dict[int, tuple[Content, int]] = {}
        self.sent: dict[int, Content] = {}

    def result(self, key: int, content: Content) -> None:
        """The worker keeps a result under this key, as its epoch 0."""
        self.epochs[key] = (content, 0)

    def forget(self, keys: Sequence[int]) -> None:
        """The worker has let these go."""
        for key in keys:
            self.epochs.pop(key, None)
