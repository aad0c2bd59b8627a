"""The record of one call: its trace, and the time of each step. Recording costs little."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from common.telemetry.traces import TraceContext
from scheduler.api import LeaseId, Placement, RequestId

_SPAN_IDS = 1 << 64
_MOST_REPORT_BYTES = 8 << 10

# Numbers of the spans of one journey; each attempt has `IN_ATTEMPT` numbers of its own.
WHOLE, RECEIVING = 0, 1
TURN, LEASE, FUNCTION, HANDLER, BELOW, IN_ATTEMPT = 8, 9, 10, 11, 12, 4096


def _now_s() -> float:  # a simulation replaces the clock, and a field would keep the real one
    return time.monotonic()


def _now_unix_ns() -> int:
    return time.time_ns()


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at an instance; times are those of `time.monotonic`, 0 for steps not reached."""

    number: int
    began_s: float = field(default_factory=_now_s)
    seated_s: float = 0.0
    leased_s: float = 0.0
    asked_s: float = 0.0
    answered_s: float = 0.0
    ended_s: float = 0.0
    instance: str = ""
    ahead: int = 0  # how many calls the instance had when it was chosen
    # From the whole request to the head of the answer, 0 for a request that was sent as it arrived.
    answered_in_s: float = 0.0
    request: RequestId | None = None
    placement: Placement | None = None
    trace_report: bytes = b""  # the function's report of its own time (`read_report`)
    error: str = ""

    def keep_report(self, trace_report: bytes) -> None:
        """Keep the function's report of its time, unless the report is too long."""
        if len(trace_report) <= _MOST_REPORT_BYTES:
            self.trace_report = trace_report


@dataclass(slots=True, eq=False)
class Journey:
    """The record of one call, from its arrival on.

    It belongs to a trace: the caller's (`parent` is the caller's span), or one of its own. The ids
    of its spans are counted from `seed`, so that they need not be kept.
    """

    call_id: str
    function: str
    method: str
    trace_id: str
    seed: int
    _: KW_ONLY
    gpu: bool
    sampled: bool
    parent: str = ""
    state: str = ""
    began_s: float = field(default_factory=_now_s)
    began_ns: int = field(default_factory=_now_unix_ns)
    received_s: float = 0.0
    ended_s: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    status: int = 0
    error: str = ""
    by_gateway: bool = False  # whether the gateway makes it: an async call, or a workflow's stage
    stage: str = ""

    def attempt(self) -> Attempt:
        attempt = Attempt(len(self.attempts))
        self.attempts.append(attempt)
        return attempt

    def span_id(self, number: int, attempt: int = 0) -> str:
        return f"{(self.seed + number + attempt * IN_ATTEMPT) % _SPAN_IDS or 1:016x}"

    def has_span(self, span_id: str) -> bool:
        """Whether this is the id of one of the journey's spans, or of the caller's span."""
        place = (int(span_id, 16) - self.seed) % _SPAN_IDS
        # One more than the last number, as the id 0 is replaced by 1.
        return span_id == self.parent or place <= max(1, len(self.attempts)) * IN_ATTEMPT

    def context(self, number: int, attempt: int = 0) -> TraceContext:
        """The trace context for work below that span."""
        return TraceContext(self.trace_id, self.span_id(number, attempt), self.sampled, self.state)

    def lines(self) -> Sequence[bytes]:
        """The trace header lines for the function, in the present attempt."""
        span = (self.seed + FUNCTION + (len(self.attempts) - 1) * IN_ATTEMPT) % _SPAN_IDS or 1
        line = f"traceparent: 00-{self.trace_id}-{span:016x}-0{self.sampled:d}\r\n".encode()
        if not self.state:
            return (line,)
        return line, b"tracestate: ", self.state.encode("latin-1"), b"\r\n"

    @property
    def trace(self) -> TraceContext:
        return self.context(WHOLE)

    @property
    def lease(self) -> LeaseId | None:
        """The last lease that the call was given."""
        given = [attempt.placement for attempt in self.attempts if attempt.placement is not None]
        return given[-1].lease if given else None

    def facts(self) -> Mapping[str, str]:
        facts = {"call_id": self.call_id, "trace_id": self.trace_id, "function": self.function}
        requests = [attempt.request for attempt in self.attempts if attempt.request is not None]
        if requests:
            facts["request"] = requests[-1]
        lease = self.lease
        return facts if lease is None else facts | {"lease": str(lease)}
