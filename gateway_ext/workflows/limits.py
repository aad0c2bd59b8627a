"""Bounds of the workflows that a gateway runs at a time, and of the data that they hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway_ext.errors import TooLarge
from gateway_ext.workflows.errors import WorkflowsBusy


@dataclass(slots=True)
class RunShare:
    """What one run holds; `hold` takes more, and the end of its call gives back the rest."""

    limits: "RunLimits"
    held_bytes: int = 0

    def hold(self, size_bytes: int) -> None:
        """Take room for that much more; WorkflowsBusy if there is none now, TooLarge if never."""
        if self.held_bytes + size_bytes > self.limits.most_bytes:
            raise TooLarge(self.limits.most_bytes, "what the workflow holds would be")
        if self.limits.held_bytes + size_bytes > self.limits.most_bytes:
            raise WorkflowsBusy("the workflows under way hold as much data as they may")
        self.limits.held_bytes += size_bytes
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.limits.held_bytes -= size_bytes
        self.held_bytes -= size_bytes


@dataclass(slots=True)
class RunLimits:
    """How many workflows may run, how much all of them and how much one answer may hold.

    The gateway itself reads, compares and joins bodies of at most `json_bytes`.
    """

    most_runs: int
    most_bytes: int
    answer_bytes: int
    json_bytes: int
    running: int = 0
    held_bytes: int = 0

    @contextmanager
    def share(self) -> Iterator[RunShare]:
        """What one call holds, from the first byte of its body on; it is no run yet."""
        share = RunShare(self)
        try:
            yield share
        finally:
            self.held_bytes -= share.held_bytes

    @contextmanager
    def run(self) -> Iterator[None]:
        """One run, while the context lasts; WorkflowsBusy if there are too many."""
        if self.running >= self.most_runs:
            raise WorkflowsBusy(f"{self.running} workflows are under way, as many as may be")
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
