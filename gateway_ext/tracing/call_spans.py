"""The spans of a call: the gateway's own, and those that its function reported."""

from collections.abc import Iterator
from dataclasses import dataclass

from common.telemetry.traces import Span, SpanKind
from gateway_ext.tracing.call_journey import (
    FUNCTION,
    LEASE,
    RECEIVING,
    TURN,
    WHOLE,
    Attempt,
    Journey,
)
from gateway_ext.tracing.function_spans import spans_below

GATEWAY = "gpufaas-gateway"

Facts = dict[str, str | int | float | bool]

_SERVER_ERROR = 500
_NS = 1_000_000_000


def spans_of(journey: Journey, now_s: float) -> list[Span]:
    """All spans of a call; for a call in progress they end now, and are marked so."""
    return list(_CallSpans(journey, now_s).all())


@dataclass(frozen=True, slots=True)
class _CallSpans:
    journey: Journey
    now_s: float

    def all(self) -> Iterator[Span]:
        journey = self.journey
        yield self._whole()
        if journey.received_s:
            yield self._span(RECEIVING, WHOLE, "receive", (journey.began_s, journey.received_s))
        for attempt in journey.attempts:
            yield from self._of(attempt)

    def _whole(self) -> Span:
        journey = self.journey
        error = journey.error
        if not error and journey.status >= _SERVER_ERROR:
            error = f"status {journey.status}"
        times = (journey.began_s, journey.ended_s or self.now_s)
        return self._span(WHOLE, WHOLE, f"call {journey.function}", times)._replace(
            parent_id=journey.parent,
            kind=SpanKind.CONSUMER if journey.by_gateway else SpanKind.SERVER,
            attributes=self._facts(),
            error=error,
        )

    def _facts(self) -> Facts:
        journey = self.journey
        facts: Facts = {
            "gpufaas.call_id": journey.call_id,
            "faas.name": journey.function,
            "http.request.method": journey.method,
            "gpufaas.gpu_function": journey.gpu,
        }
        if journey.ended_s:
            facts["http.response.status_code"] = journey.status
        else:
            facts["gpufaas.running"] = True
        if journey.stage:
            facts["gpufaas.stage"] = journey.stage
        elif journey.by_gateway:
            facts["gpufaas.async"] = True
        return facts

    def _of(self, attempt: Attempt) -> Iterator[Span]:
        number = attempt.number
        ended_s = attempt.ended_s or self.journey.ended_s or self.now_s
        seated_s = attempt.seated_s or ended_s
        turn = self._span(TURN, WHOLE, "wait for an instance", (attempt.began_s, seated_s), number)
        why = attempt.error or self.journey.error
        yield turn if attempt.seated_s else turn._replace(error=why)
        if attempt.request is not None:
            leased_s = attempt.leased_s or ended_s
            yield self._span(LEASE, WHOLE, "lease", (seated_s, leased_s), number)._replace(
                kind=SpanKind.CLIENT,
                attributes=_leased(attempt),
                error="" if attempt.leased_s else why,
            )
        if attempt.asked_s:
            called = self._called(attempt, ended_s)
            yield called
            yield from spans_below(self.journey, attempt, called.begin_ns, called.end_ns)

    def _called(self, attempt: Attempt, ended_s: float) -> Span:
        facts: Facts = {"gpufaas.instance": attempt.instance}
        error = attempt.error
        if not attempt.answered_s:
            error = error or self.journey.error
        else:
            facts["gpufaas.first_byte_s"] = round(attempt.answered_s - attempt.asked_s, 6)
        times = (attempt.asked_s, ended_s)
        return self._span(FUNCTION, WHOLE, "function", times, attempt.number)._replace(
            kind=SpanKind.CLIENT, attributes=facts, error=error
        )

    def _span(
        self, number: int, parent: int, name: str, times_s: tuple[float, float], attempt: int = 0
    ) -> Span:
        begin_s, end_s = times_s
        return Span(
            trace_id=self.journey.trace_id,
            span_id=self.journey.span_id(number, attempt),
            parent_id=self.journey.span_id(parent),
            name=name,
            service=GATEWAY,
            begin_ns=self._wall_ns(begin_s),
            end_ns=self._wall_ns(max(begin_s, end_s)),
        )

    def _wall_ns(self, at_s: float) -> int:
        return self.journey.began_ns + round((at_s - self.journey.began_s) * _NS)


def _leased(attempt: Attempt) -> Facts:
    facts: Facts = {"gpufaas.request": str(attempt.request)}
    placement = attempt.placement
    if placement is None:
        return facts
    return facts | {
        "gpufaas.lease": placement.lease,
        "gpufaas.gpu": placement.gpu,
        "gpufaas.node": placement.node,
        "gpufaas.hit": placement.hit,
        "gpufaas.expected_load_s": placement.estimate.load_s,
        "gpufaas.expected_run_s": placement.estimate.run_s,
    }
