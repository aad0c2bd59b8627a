"""What the current call has with it: the time left, and the times of its GPU calls.

Its caller adds the times to its trace: text in the format of `docs/tracing.md`. Calls without a
trace are not timed.
"""

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from types import TracebackType
from urllib.parse import quote

# All entries have to fit into one header, limited to 8 KiB by gateways; further ones are summed up.
_MOST_CHARACTERS = 7_000
_MOST_ACQUIRES = 3
_ERROR_CHARACTERS = 60
_REASON_CHARACTERS = 80
UNTIMED: AbstractContextManager[None] = nullcontext()
_TRACE = re.compile(r"([0-9a-f]{2}-[0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2}).*", re.ASCII)


class CallTiming:
    """The times of one graph call, which is made inside its `with` block, once."""

    __slots__ = (
        *("span_id", "header", "facts", "error"),
        *("_begin_us", "_began", "_acquires", "_ended", "_before"),
    )
    _before: "Token[CallTiming | None]"

    def __init__(self, trace: str, flags: str, ended: "Callable[[CallTiming], None]") -> None:
        self.span_id = f"{random.getrandbits(64) or 1:016x}"
        self.header = f"{trace}-{self.span_id}-{flags}"  # the traceparent sent to the worker
        self.facts: list[str] = []
        self.error = ""
        self._begin_us = time.time_ns() // 1_000
        self._began = time.perf_counter_ns()
        self._acquires: list[str] = []
        self._ended = ended

    def __enter__(self) -> "CallTiming":
        self._before = _timing.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        _timing.reset(self._before)
        self._ended(self)

    @property
    def now_us(self) -> int:
        """The current Unix time, measured by the clock of all entries."""
        return self._begin_us + (time.perf_counter_ns() - self._began) // 1_000

    def acquired(
        self, begun_us: int, lease: int, queue_s: float, load_s: float, request: str
    ) -> None:
        """Record the wait for a lease since `begun_us`; `request` was created for this lease."""
        if len(self._acquires) < _MOST_ACQUIRES:
            took_us = self.now_us - begun_us
            entry = f"a;{self.span_id};{begun_us};{took_us};l={lease}"
            entry += f";q={_us(queue_s)};d={_us(load_s)}"
            self._acquires.append(entry + (f";r={quote(request, safe='/')}" if request else ""))

    def answered(self, lease: int, digest: str, batch: int, times: Sequence[float]) -> None:
        """Record an answer; `times` are seconds of waiting, transfer, compute, transfer back."""
        waited_s, transfer_s, compute_s, out_s = times
        in_s = max(0.0, transfer_s - out_s)
        self.facts = [
            *(f"l={lease}", f"m={digest[:12]}", f"b={batch}", f"w={_us(waited_s)}"),
            *(f"i={_us(in_s)}", f"k={_us(compute_s)}", f"o={_us(out_s)}"),
        ]

    def ran_locally(self, reason: str) -> None:
        self.facts = [f"h={quote(reason[:_REASON_CHARACTERS])}"]

    def entries(self, took_us: int) -> list[str]:
        """Return the entries of this call: its waits for leases, and the call itself."""
        error = [f"e={quote(self.error[:_ERROR_CHARACTERS])}"] if self.error else []
        call = ";".join((f"c;{self.span_id};{self._begin_us};{took_us}", *self.facts, *error))
        return [*self._acquires, call]

    @property
    def took_us(self) -> int:
        return (time.perf_counter_ns() - self._began) // 1_000


class Timings:
    """The times of one request's graph calls, in the order of their ends. Thread-safe."""

    def __init__(self, trace: str) -> None:
        match = _TRACE.fullmatch(trace)
        self._trace = None if match is None else match.groups()
        self._lock = threading.Lock()
        self._entries: list[str] = []
        self._characters = self._more = self._more_us = 0

    def call(self) -> AbstractContextManager[CallTiming | None]:
        """Time the graph call made inside the `with` block; it gets None if there is no trace."""
        if self._trace is None:
            return UNTIMED
        trace, flags = self._trace
        return CallTiming(trace, flags, self._add)

    def entries(self) -> list[str]:
        with self._lock:
            more = [f"x;{self._more};{self._more_us}"] if self._more else []
            return [*self._entries, *more]

    def _add(self, timing: CallTiming) -> None:
        took_us = timing.took_us
        with self._lock:
            entries = timing.entries(took_us)
            size = sum(map(len, entries)) + len(entries)
            if not self._more and self._characters + size <= _MOST_CHARACTERS:
                self._characters += size
                self._entries += entries
            else:
                self._more += 1
                self._more_us += took_us


_timing: ContextVar[CallTiming | None] = ContextVar("gpufaas_graph_call", default=None)


def timing() -> CallTiming | None:
    return _timing.get()


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


# The deadline of the call that the current code serves: this code may wait no longer itself.

SecondsLeft = Callable[[], float | None]

# Set by whoever knows the call; below, nothing of calls is known.
DEADLINE: ContextVar[SecondsLeft | None] = ContextVar("gpufaas_deadline", default=None)


def seconds_left() -> float | None:
    """The seconds that are left to the current call; None without a deadline."""
    left_s = DEADLINE.get()
    return None if left_s is None else left_s()
