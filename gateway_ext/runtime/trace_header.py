"""A call's times for its trace, in the header X-Gpu-Trace.

The gateway reads it (`reported_trace.py`, docs/tracing.md) and sends it to no caller.
"""

import time
from collections.abc import Sequence

from gateway_ext.runtime.handler.handler_event import Headers

NAME = "X-Gpu-Trace"
_VERSION = "1"

Pairs = list[tuple[str, str]]


class Timing:
    """The times of one call, from its arrival on; reported only if the request names its trace."""

    __slots__ = (
        "trace", "_arrived", "_began", "_began_ns", "_ended", "_below", "_at_a_time", "_batch",
    )  # fmt: skip

    def __init__(self, headers: Headers, at_a_time: int = 0) -> None:
        """`at_a_time` is the number of calls that are served at a time, or 0 for any number."""
        self.trace = headers.get("traceparent", "")
        self._at_a_time = at_a_time
        self._arrived = self._began = time.perf_counter_ns()
        self._began_ns = 0
        self._ended = 0
        self._below: Sequence[str] = ()
        self._batch = 0

    @property
    def trace_id(self) -> str:
        """The trace's id, or an empty text."""
        parts = self.trace.split("-")
        return parts[1] if len(parts) > 1 else ""

    def begins(self, batch: int = 0) -> None:
        """The handler is called, with a list of so many calls: the call's wait ends."""
        self._batch = batch
        self._began = time.perf_counter_ns()
        self._began_ns = time.time_ns()

    def ends(self, below: Sequence[str]) -> None:
        """The handler has answered; `below` are the times of its graph calls."""
        self._ended = time.perf_counter_ns()
        self._below = below

    @property
    def trailers(self) -> tuple[str, ...]:
        """The names that a stream announces."""
        return (NAME,) if self.trace else ()

    def header(self) -> Pairs:
        """The header, or trailer."""
        if not self.trace:
            return []
        took_us = ((self._ended or time.perf_counter_ns()) - self._began) // 1_000
        queued_us = (self._began - self._arrived) // 1_000
        handler = f"{_VERSION} h;{self._began_ns // 1_000};{took_us};q={queued_us}"
        if self._at_a_time:
            handler = f"{handler};t={self._at_a_time}"
        if self._batch:
            handler = f"{handler};b={self._batch}"
        return [(NAME, " ".join((handler, *self._below)) if self._below else handler)]
