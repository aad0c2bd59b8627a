"""An instance's lines on their way to the log: those within its budget, and notices of the rest."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic

from gateway_ext.providers.managed.logs.output_budget import Line, OutputBudget

_NOTICE_EVERY_S = 1.0


class LimitedOutput(Generic[Line]):
    """Passes lines on to `store`, and a text about lines that were too many to `note`."""

    def __init__(
        self, store: Callable[[Sequence[Line]], None], note: Callable[[str], None]
    ) -> None:
        self._store = store
        self._note = note
        self._loop = asyncio.get_running_loop()
        self._budget = OutputBudget(self._loop.time())
        self._noticing: asyncio.TimerHandle | None = None

    def add(self, lines: Sequence[Line], byte_count: int) -> float:
        """Store what the budget allows; returns for how long nothing should be read."""
        now_s = self._loop.time()
        kept = self._budget.keep(lines, byte_count, now_s)
        if kept:
            self._store(kept)
        if self._budget.has_dropped and self._noticing is None:
            self._noticing = self._loop.call_later(_NOTICE_EVERY_S, self._write_notice)
        return self._budget.pause_s(len(lines), byte_count, now_s)

    def close(self) -> None:
        """Write the last notice; nothing is passed on afterwards."""
        if self._noticing is not None:
            self._noticing.cancel()
        self._write_notice()
        self._store = self._note = _drop  # else a cycle: methods of whoever has this object

    def _write_notice(self) -> None:
        self._noticing = None
        if text := self._budget.notice():
            self._note(text)


def _drop(_: object) -> None:
    pass
