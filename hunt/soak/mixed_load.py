"""Calls of the examples at random moments: plain, GPU, streaming, async ones, a workflow."""

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import uvloop

from bench.load.arrivals import at_rate
from bench.load.http_callers import target_at
from bench.load.load_run import LoadOutcome, TrafficPlan, run
from bench.load.statistics import CallTally
from bench.measure.load_figures import http_post
from bench.measure.report import MeasurementFailed
from gateway_ext.runtime.template.example_calls import examples_in
from scheduler.sim.workload import Arrivals, Pattern

# Longer than the workflow may take: what it did not end by then, it answers with the reason.
_TIMEOUT_S = 150.0
# An answer, a call that is queued, and a refusal by a limit or a quota.
_EXPECTED = frozenset({200, 202, 429})


class SoakCall(NamedTuple):
    """A way to call an example; `share` is its part of the calls."""

    name: str
    path: str
    body_of: str
    share: float


CALLS = (
    SoakCall("hello", "/function/hello", "hello", 0.40),
    SoakCall("classify", "/function/classify", "classify", 0.15),
    SoakCall("pipeline", "/function/pipeline", "pipeline", 0.15),
    SoakCall("generate (stream)", "/function/generate", "generate", 0.10),
    SoakCall("hello (async)", "/async-function/hello", "hello", 0.05),
    SoakCall("classify (async)", "/async-function/classify", "classify", 0.05),
    SoakCall("workflow", "/workflow/describe-picture", "classify", 0.10),
)


class MixedLoad:
    """Calls from a thread of its own, until their time is over; the context waits for the last."""

    def __init__(self, url: str, examples: Path, rate: float, seconds: float, seed: int) -> None:
        bodies = {each.body_of: examples_in(examples / each.body_of)[0].body for each in CALLS}
        self._plan = TrafficPlan(
            target=target_at(url),
            functions=tuple(each.name for each in CALLS),
            requests=[http_post(each.path, body=bodies[each.body_of]) for each in CALLS],
            seconds=seconds,
            timeout_s=_TIMEOUT_S,
            arrivals=at_rate(
                [each.share for each in CALLS], rate, seconds, Pattern(Arrivals.POISSON), seed
            ),
            on_answer=self._answered,
        )
        self._outcome: LoadOutcome | None = None
        self._examples: dict[tuple[str, int], bytes] = {}
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.join()

    def statuses(self) -> Mapping[str, Mapping[str, int]]:
        """How each kind of call was answered, by status; MeasurementFailed if the load broke."""
        figures = self._tally().by_function()
        return {name: found.statuses for name, found in figures.items()}

    def unexpected(self) -> Mapping[str, int]:
        """The answers that no limit and no quota explains, with the first text of each.

        After them stands why answers did not come, whatever was called.
        """
        found = unexpected_answers(self.statuses(), self._examples)
        why = self._tally().reasons.items()
        return {**found, **{f"(of all without an answer) {text}": count for text, count in why}}

    def _tally(self) -> CallTally:
        if self._outcome is None:
            raise MeasurementFailed("the load has not ended")
        return self._outcome.tally

    def _answered(self, kind: int, status: int, body: bytes) -> None:
        if status not in _EXPECTED:
            self._examples.setdefault((CALLS[kind].name, status), body[:200])

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._outcome = runner.run(
                run(self._plan, asyncio.Event(), lambda _outcome, _in_flight: None)
            )


def unexpected_answers(
    statuses: Mapping[str, Mapping[str, int]], examples: Mapping[tuple[str, int], bytes]
) -> Mapping[str, int]:
    """How many answers of each kind were neither good nor a refusal, with an example's text."""
    found: Counter[str] = Counter()
    good = {str(status) for status in _EXPECTED}
    for name, counts in statuses.items():
        for status, count in counts.items():
            if status not in good:
                text = examples.get((name, int(status)), b"") if status.isdecimal() else b""
                found[f"{name}: {status} {text.decode(errors='replace')}".strip()] += count
    return found


def rows_of(statuses: Mapping[str, Mapping[str, int]]) -> Sequence[str]:
    """The rows of a table of answers."""
    return [
        f"| {name} | " + ", ".join(f"{status}: {n}" for status, n in counts.items()) + " |"
        for name, counts in statuses.items()
    ]
