"""What calls have shown of a function: its models, its work without a GPU, its waits; pure."""

import re
import string
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cache_manager.model.ids import ModelId
from gateway_ext.model import FunctionId

# A model's id begins with its digest's first characters, in the namespace of its function.
_DIGITS = 20
_RECENT = 4
_MOST_MODELS = 16
_HEX = frozenset(string.hexdigits)
_MOST_LINES = 20
_MOST_CHARACTERS = 240
_MOST_BYTES = 8 << 10  # of one report of work without a GPU
_TRACING = "tracing: "


class GpuReport(NamedTuple):
    """What a function reports of one call, before its answer or behind a stream.

    These are the models that it used, its times, and what ran on its own processor instead. With
    `turns` of `1` the instance runs calls under one lease in turn.
    """

    models: bytes = b""
    trace: bytes = b""
    local: bytes = b""
    turns: bytes = b""


class Learned:
    """What reports have said since the function was deployed.

    `models` are those that the next call is expected to use: which each of the latest calls used.
    For a function whose calls differ these are fewer models than a call will use, or none: a call
    asks for a missing model by itself, which costs less than loading a model that is not used.
    """

    __slots__ = ("lines", "models", "_function", "_recent", "_last_report")

    def __init__(self, function: FunctionId, declared: Sequence[str] = ()) -> None:
        # Work without a GPU, as it was reported: the function's own text, to be shown as text.
        self.lines: tuple[str, ...] = ()
        self._function = function
        self._recent: deque[frozenset[ModelId]] = deque(maxlen=_RECENT)
        self._last_report = b""
        self.models = self._ids(declared)

    def saw(self, report: bytes) -> None:
        """Take the digests that a call reports; a call without models reports none."""
        recent = self._recent
        if (
            report == self._last_report
            and len(recent) == _RECENT
            and all(r == recent[0] for r in recent)
        ):
            return
        digests = report.decode("latin-1").split(",")
        models = self._ids([digest.strip() for digest in digests])
        if not models:
            return
        self._last_report = report
        self._recent.append(frozenset(models))
        self.models = tuple(
            model for model in models if all(model in used for used in self._recent)
        )

    @property
    def known(self) -> bool:
        """Whether a call or the deployment has named models since the last `forget`."""
        return bool(self.models or self._recent)

    @property
    def reported(self) -> bool:
        """Whether calls have named the models, which then are the function's word alone."""
        return bool(self._recent)

    def forget(self) -> None:
        """The scheduler no longer knows the models: expect none until a call reports them again."""
        self._recent.clear()
        self._last_report = b""
        self.models = ()

    def saw_local(self, report: bytes) -> None:
        """Add the lines of a report of work without a GPU; the first ones stay."""
        if len(self.lines) >= _MOST_LINES:
            return
        texts = report[:_MOST_BYTES].decode("latin-1").split("|")
        shown = [_printable(text.strip()) for text in texts]
        lasting = [text for text in shown if text and not text.startswith(_TRACING)]
        lines = dict.fromkeys((*self.lines, *lasting))
        if len(lines) > len(self.lines):  # the page compares by identity
            self.lines = tuple(lines)[:_MOST_LINES]

    def _ids(self, digests: Sequence[str]) -> tuple[ModelId, ...]:
        ids = [
            ModelId(f"{self._function.namespace}/{digest[:_DIGITS].lower()}")
            for digest in digests[:_MOST_MODELS]
            if len(digest) >= _DIGITS and _HEX.issuperset(digest)
        ]
        return tuple(dict.fromkeys(ids))


def tracing_line(report: bytes) -> bytes:
    """What the caller is told: that the call ran on the processor while a graph was traced."""
    first = _printable(report[:_MOST_CHARACTERS].decode("latin-1").partition("|")[0])
    return first.encode() if first.startswith(_TRACING) else b""


def _printable(text: str) -> str:
    shown = text[:_MOST_CHARACTERS]
    return "".join(character if " " <= character <= "~" else "?" for character in shown)


# Calls wait in three places: here, for an instance with a free place; in the instance, for a
# thread; and at the scheduler, for a GPU. Nothing is expected until calls have waited: a function
# that has just started, or that nobody has kept busy yet, refuses no call for its wait.

_WEIGHT = 0.25
# A refusal by the scheduler holds for calls after it for this long at most.
_MOST_CLOSED_S = 1.0


class WaitPace:
    """The seconds by which each waiting call delays those behind it, as past waits show."""

    __slots__ = ("each_s",)

    def __init__(self) -> None:
        self.each_s: float | None = None

    def saw(self, ahead: int, waited_s: float, at_a_time: int) -> None:
        """Take in the wait of a call that came behind so many waiting ones.

        Of calls that are served so many at a time, as many waiting ones may begin together: after a
        slow start of all of them the first one has waited no less than the last one.
        """
        each_s = waited_s / max(ahead + 1, at_a_time)
        known_s = self.each_s
        self.each_s = each_s if known_s is None else known_s + _WEIGHT * (each_s - known_s)

    def wait_s(self, ahead: int) -> float:
        """The expected wait behind so many waiting calls; 0 while nothing is known."""
        return 0.0 if self.each_s is None else ahead * self.each_s


class CallWaits:
    """The waits of one function's calls; `known` once some call has waited.

    `at_a_time` is how many calls an instance serves at a time, as it reports: only reports of calls
    beside so many others say anything about waits.
    """

    __slots__ = ("known", "at_a_time", "_turns", "_threads", "_closed_until_s", "_gpu_wait_s")

    def __init__(self) -> None:
        self.known = False
        self.at_a_time = 0
        self._turns = WaitPace()
        self._threads = WaitPace()
        self._closed_until_s = self._gpu_wait_s = 0.0

    def saw_turn(self, ahead: int, waited_s: float, instances: int, places: int = 1) -> None:
        """A call has waited for one of the places of the instances, behind so many others."""
        self.known = True
        self._turns.saw(ahead, waited_s * instances, places)

    def saw_report(self, ahead: int, trace_report: bytes, answered_in_s: float = 0.0) -> None:
        """An instance reports a call that it was sent beside so many others.

        `answered_in_s` is the time from the whole request to the answer, if nobody else could make
        it longer: a busy process also reads late, which its own report does not show. The report is
        the function's own: a wrong one delays or refuses only that function's calls.
        """
        wait = thread_wait(trace_report)
        if wait is None:
            return
        self.at_a_time = wait.at_a_time
        if ahead >= wait.at_a_time:
            self.known = True
            waited_s = max(wait.waited_s, answered_in_s - wait.took_s)
            self._threads.saw(ahead - wait.at_a_time, waited_s, wait.at_a_time)

    def saw_full_gpus(self, wait_s: float, most_s: float, now_s: float) -> None:
        """The scheduler refused a call, since its wait of `wait_s` would exceed `most_s`.

        Until enough of the wait is over, further calls need not ask the scheduler.
        """
        if wait_s > most_s:
            self.known = True
            self._gpu_wait_s = wait_s
            self._closed_until_s = now_s + min(wait_s - most_s, _MOST_CLOSED_S)

    def expected_s(self, waiting: int, unanswered: int, instances: int, now_s: float) -> float:
        """The wait of a call that arrives now; `waiting` have no instance, `unanswered` have one.

        While no call has waited for an instance, those that wait delay others as in an instance.
        """
        at_gpus_s = self._gpu_wait_s if now_s < self._closed_until_s else 0.0
        turns = self._threads if self._turns.each_s is None else self._turns
        for_turn_s = turns.wait_s(waiting) / instances
        for_thread_s = self._threads.wait_s(max(0, unanswered // instances - self.at_a_time))
        return at_gpus_s + for_turn_s + for_thread_s


# What decides in a function's report of its time (X-Gpu-Trace, docs/tracing.md), which is read for
# every call; the whole of it is read only for a trace that is shown.

_WAIT = re.compile(rb"1 h;\d{1,18};(\d{1,12});q=(\d{1,12});t=([1-9]\d{0,5})(?:[ ;]|\Z)", re.ASCII)
_BATCH = re.compile(rb"1 h;[^ ]{1,100};b=([1-9]\d{0,3})(?: |\Z)", re.ASCII)


class ThreadWait(NamedTuple):
    """How long a call waited for a thread, how long its handler took, and how many calls its
    instance serves at a time."""

    waited_s: float
    took_s: float
    at_a_time: int


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
