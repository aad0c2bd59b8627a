"""One call of a function, as it goes through the gateway."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from gateway_ext.calls.function_table import Function
from gateway_ext.calls.passed_headers import RequestHeaders
from gateway_ext.tracing.journey import Journey


class CallPart(NamedTuple):
    """A call that is a stage of a workflow: it may take `within_s`, and should take `slo_s`.

    One that comes `later`, after others of its run, may wait for all of `within_s`: a refusal would
    waste what those have computed.
    """

    workflow: str
    stage: str
    within_s: float
    slo_s: float | None = None
    later: bool = False


@dataclass(slots=True)
class FunctionCall:
    """A request for a function; `rest` and `query` are as they were sent.

    `own_id`: no other call can have its id. It must have ended at `deadline_s` (monotonic), which
    the start of an instance puts off, and at `latest_s` whatever it waits for.
    """

    function: Function
    method: str
    rest: bytes
    query: bytes
    asked: RequestHeaders
    journey: Journey
    own_id: bool
    client: bytes = b""
    body: bytes = b""
    part: CallPart | None = None
    sent_status: int = 0  # of the response that the caller gets, once it has begun
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        self.deadline_s = self.journey.began_s + self.timeout_s

    @property
    def timeout_s(self) -> float:
        limit_s = self.function.options.timeout_s
        return limit_s if self.part is None else min(limit_s, self.part.within_s)

    @property
    def latest_s(self) -> float:
        return math.inf if self.part is None else self.journey.began_s + self.part.within_s

    def learn(
        self, trace_report: bytes, models: bytes, local: bytes, answered_in_s: float = 0.0
    ) -> None:
        """Take what the function reports, before its answer or behind a stream."""
        function, attempt = self.function, self.journey.attempts[-1]
        if trace_report:
            attempt.keep_report(trace_report)
            if attempt.ahead >= function.waits.at_a_time:
                function.waits.saw_report(attempt.ahead, trace_report, answered_in_s)
        if models:
            function.learned.saw(models)
        if local:
            function.local.saw(local)
