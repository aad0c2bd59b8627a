"""The call, trace, function, lease or request that the current task works for.

Log lines show these facts. The code that begins such work sets `ABOUT`; tasks and callbacks made
after that inherit it.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from common.telemetry.traces import TraceContext


class About(Protocol):
    """Facts of the current work, computed only when a log line is written."""

    @property
    def trace(self) -> TraceContext | None:
        """The trace that the work belongs to, below the span that asked for it."""

    def facts(self) -> Mapping[str, str]: ...


@dataclass(slots=True)
class Work:
    """Facts of some work; more may be filled in while it runs."""

    trace: TraceContext | None = None
    call_id: str = ""
    function: str = ""
    request: str = ""
    lease: int = 0

    def facts(self) -> Mapping[str, str]:
        """The fields of a log line; unknown facts are left out."""
        fields = {
            "call_id": self.call_id,
            "trace_id": "" if self.trace is None else self.trace.trace_id,
            "function": self.function,
            "request": self.request,
            "lease": str(self.lease) if self.lease else "",
        }
        return {name: value for name, value in fields.items() if value}


ABOUT: ContextVar[About | None] = ContextVar("gpufaas_about", default=None)
