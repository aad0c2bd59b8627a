"""A function's report of its time in the header X-Gpu-Trace (docs/tracing.md). Pure.

The report is not trusted: unreadable parts are left out, and it affects nothing but the trace that
is shown, and how long further calls of the same function are expected to wait.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote

VERSION = "1"

_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_SPAN_ID = re.compile(r"(?!0{16})[0-9a-f]{16}", re.ASCII)
_WAIT = re.compile(rb"1 h;\d{1,18};(\d{1,12});q=(\d{1,12});t=([1-9]\d{0,5})(?:[ ;]|\Z)", re.ASCII)
_BATCH = re.compile(rb"1 h;[^ ]{1,100};b=([1-9]\d{0,3})(?: |\Z)", re.ASCII)
_MOST_ENTRIES = 200
_MOST_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class CallTimes:
    """When an operation began by the function's clock, and how long it took, in microseconds.

    `facts` are numbers and names by single letters; `parent` is the id of the graph call that the
    operation belongs to.
    """

    begin_us: int
    took_us: int
    span_id: str = ""
    parent: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """0 if it is missing or no number."""
        return _number(self.facts.get(name, "0")) or 0


class ThreadWait(NamedTuple):
    """How long a call waited for a thread, how long its handler took, and how many calls its
    instance serves at a time."""

    waited_s: float
    took_s: float
    at_a_time: int


@dataclass(slots=True)
class ReportedTrace:
    """The report of one response."""

    handler: CallTimes | None = None
    calls: list[CallTimes] = field(default_factory=list)
    acquires: list[CallTimes] = field(default_factory=list)
    more_calls: int = 0
    more_us: int = 0


def read(header: bytes) -> ReportedTrace:
    """The readable part of the report."""
    report = ReportedTrace()
    version, *entries = header.decode("latin-1").split(" ", _MOST_ENTRIES)
    if version != VERSION:
        return report
    for entry in entries:
        letter, *parts = entry.split(";")
        if letter == "x":
            report.more_calls, report.more_us = [_number(part) or 0 for part in (*parts, "", "")][
                :2
            ]
            continue
        times = _times(letter, parts)
        if times is None:
            continue
        if letter == "h":
            report.handler = times
        elif letter == "c":
            report.calls.append(times)
        elif letter == "a":
            report.acquires.append(times)
    return report


def thread_wait(header: bytes) -> ThreadWait | None:
    """None if its function does not say."""
    match = _WAIT.match(header)
    if match is None:
        return None
    took_us, waited_us, at_a_time = (int(number) for number in match.groups())
    return ThreadWait(waited_us / 1e6, took_us / 1e6, at_a_time)


def batch_size(header: bytes) -> int:
    """0 if the report does not say."""
    match = _BATCH.match(header)
    return 0 if match is None else int(match[1])


def _times(letter: str, parts: list[str]) -> CallTimes | None:
    """`h;begin;took;...`, `c;span;begin;took;...`, `a;parent;begin;took;...`."""
    named = parts.pop(0) if letter != "h" and parts else ""
    if letter != "h" and not _SPAN_ID.fullmatch(named):
        return None
    begin_us, took_us = [_number(part) for part in (*parts, "", "")][:2]
    if begin_us is None or took_us is None:
        return None
    span_id, parent = (named, "") if letter == "c" else ("", named)
    return CallTimes(begin_us, took_us, span_id, parent, dict(_facts(parts[2:])))


def _facts(parts: list[str]) -> Iterator[tuple[str, str]]:
    for part in parts:
        name, _, value = part.partition("=")
        shown = unquote(value)
        if len(name) == 1 and len(shown) <= _MOST_CHARACTERS and shown.isprintable():
            yield name, shown


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None
