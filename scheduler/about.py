"""What the work at hand is about: the call, trace, function, lease or request that it is done for.

Log lines show it. Whoever begins such work sets `ABOUT`; what follows inherits it, as every task
and every callback does that is made meanwhile.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from scheduler.traces import TraceContext


class About(Protocol):
    """Says what it is about, once somebody asks; so nothing is spent where no line is written."""

    @property
    def trace(self) -> TraceContext | None:
        """The trace that the work belongs to, below the span that asked for it."""
        ...

    def facts(self) -> Mapping[str, str]:
        """The fields of a log line."""
        ...


@dataclass(slots=True)
class Work:
    """What is known of some work; more may become known on its way."""

    trace: TraceContext | None = None
    call_id: str = ""
    function: str = ""
    request: str = ""
    lease: int = 0

    def facts(self) -> Mapping[str, str]:
        """The fields of a log line; those that are not known are left out."""
        found = {
            "call_id": self.call_id,
            "trace_id": "" if self.trace is None else self.trace.trace_id,
            "function": self.function,
            "request": self.request,
            "lease": str(self.lease) if self.lease else "",
        }
        return {name: value for name, value in found.items() if value}


ABOUT: ContextVar[About | None] = ContextVar("gpufaas_about", default=None)
