"""The record of one call: its trace, and the time of each step. Recording costs little."""

import time
from collections.abc import Mapping, Sequence

from common.telemetry.traces import TraceContext
from scheduler.api import LeaseId, Placement, RequestId

_SPAN_IDS = 1 << 64
_MOST_REPORT_BYTES = 8 << 10

# Numbers of spans of one journey; those of an attempt come after those of the ones before.
WHOLE, RECEIVING = 0, 1
TURN, LEASE, FUNCTION, HANDLER, BELOW, IN_ATTEMPT = 8, 9, 10, 11, 12, 4096


class Attempt:
    """One try at an instance; times are those of `time.monotonic`, 0 where it did not come to it.

    `told` is what the function said of its own time (`told.py`).
    """

    __slots__ = (
        "number", "began_s", "seated_s", "leased_s", "asked_s", "answered_s", "ended_s",
        "instance", "request", "placement", "trace_report", "error",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.began_s = time.monotonic()
        self.seated_s = self.leased_s = self.asked_s = self.answered_s = self.ended_s = 0.0
        self.instance = ""
        self.request: RequestId | None = None
        self.placement: Placement | None = None
        self.trace_report = b""
        self.error = ""

    def keep_report(self, trace_report: bytes) -> None:
        """Keep the function's report of its time, unless the report is too long."""
        if len(trace_report) <= _MOST_REPORT_BYTES:
            self.trace_report = trace_report


class Journey:
    """One call, from the moment in which it came.

    It belongs to a trace: that of whoever called (`parent` is their span), or one of its own. The
    ids of its spans are `seed` and what follows, so that they need not be kept.
    """

    __slots__ = (
        "call_id", "function", "gpu", "method", "trace_id", "parent", "seed", "sampled", "state",
        "began_s", "began_ns", "received_s", "attempts", "ended_s", "status", "error", "again",
    )  # fmt: skip

    def __init__(
        self,
        call_id: str,
        function: str,
        method: str,
        trace_id: str,
        seed: int,
        *,
        gpu: bool,
        sampled: bool,
    ) -> None:
        self.call_id = call_id
        self.function = function
        self.gpu = gpu
        self.method = method
        self.trace_id = trace_id
        self.parent = ""
        self.seed = seed
        self.sampled = sampled
        self.state = ""
        self.began_s = time.monotonic()
        self.began_ns = time.time_ns()
        self.received_s = self.ended_s = 0.0
        self.attempts: list[Attempt] = []
        self.status = 0
        self.error = ""
        self.again = False  # made by the gateway itself, for a call of an async function

    def attempt(self) -> Attempt:
        """It is tried, perhaps once more."""
        found = Attempt(len(self.attempts))
        self.attempts.append(found)
        return found

    def span_id(self, number: int, attempt: int = 0) -> str:
        """The id of one of its spans."""
        return f"{(self.seed + number + attempt * IN_ATTEMPT) % _SPAN_IDS or 1:016x}"

    def knows(self, span_id: str) -> bool:
        """Whether it is the id of one of its spans, or of the caller's."""
        place = (int(span_id, 16) - self.seed) % _SPAN_IDS
        # One more, as the id after the last one of all is 1 and not 0.
        return span_id == self.parent or place <= max(1, len(self.attempts)) * IN_ATTEMPT

    def context(self, number: int, attempt: int = 0) -> TraceContext:
        """The trace context for work below that span."""
        return TraceContext(self.trace_id, self.span_id(number, attempt), self.sampled, self.state)

    def lines(self) -> Sequence[bytes]:
        """The header lines that a function gets, in the attempt that is being made."""
        span = (self.seed + FUNCTION + (len(self.attempts) - 1) * IN_ATTEMPT) % _SPAN_IDS or 1
        line = f"traceparent: 00-{self.trace_id}-{span:016x}-0{self.sampled:d}\r\n".encode()
        if not self.state:
            return (line,)
        return line, b"tracestate: ", self.state.encode("latin-1"), b"\r\n"

    @property
    def trace(self) -> TraceContext:
        """The context of the whole."""
        return self.context(WHOLE)

    @property
    def lease(self) -> LeaseId | None:
        """The last one that it was given."""
        given = [each.placement for each in self.attempts if each.placement is not None]
        return given[-1].lease if given else None

    def facts(self) -> Mapping[str, str]:
        """The facts for a log line."""
        found = {"call_id": self.call_id, "trace_id": self.trace_id, "function": self.function}
        requests = [each.request for each in self.attempts if each.request is not None]
        if requests:
            found["request"] = requests[-1]
        lease = self.lease
        return found if lease is None else found | {"lease": str(lease)}
