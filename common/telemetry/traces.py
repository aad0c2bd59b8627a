"""Trace contexts as W3C's headers carry them, and finished spans. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_FIRST_VERSION, _NO_VERSION = "00", "ff"
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 1
_MOST_STATE_CHARACTERS = 512

Attributes = Mapping[str, str | int | float | bool]
_NOTHING: Attributes = {}


class TraceContext(NamedTuple):
    """A trace, the parent span in it, and whether the trace is sampled."""

    trace_id: str
    span_id: str
    sampled: bool = False
    state: str = ""

    @property
    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.sampled)}"


class SpanKind(IntEnum):
    """The role of a span towards its callers; the numbers are OpenTelemetry's."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3
    PRODUCER = 4
    CONSUMER = 5


class Span(NamedTuple):
    """One operation of a `service`; times are nanoseconds since 1970.

    `error` is the reason of a failure, else empty.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    begin_ns: int
    end_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = _NOTHING
    error: str = ""

    @property
    def took_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


class Sink(Protocol):
    """Takes finished spans to keep or to send; never waits."""

    def add(self, make: Callable[[], Iterable[Span]]) -> None:
        """Take these spans; `make` builds them later, off the caller's path."""

    def counts(self) -> Mapping[str, int]:
        """How many spans were sent or failed, and how many calls (or requests) were dropped."""


NO_COUNTS: Mapping[str, int] = {"sent": 0, "failed": 0, "dropped": 0}


def trace_of(parent: str, state: str = "") -> TraceContext | None:
    """The context that a request's headers name; None where they name none that is valid."""
    match = _HEADER.fullmatch(parent)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == _NO_VERSION or (rest and version == _FIRST_VERSION):
        return None
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    kept = state if len(state) <= _MOST_STATE_CHARACTERS and state.isprintable() else ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), kept)


def plain_span(span: Span) -> dict[str, Any]:
    shown = span._asdict() | {"kind": span.kind.name.lower(), "attributes": dict(span.attributes)}
    return {name: value for name, value in shown.items() if value != "" or name == "parent_id"}
