"""Functions and dead letters as the page shows them: made anew only on a change."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gateway_ext.calls.function_table import Function
from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.values import DeadLetter, JobNumber
from gateway_ext.metrics import BOUNDS_S, GatewayMeters
from gateway_ext.ui.shown_names import in_order
from gateway_ext.ui.state import Json

# A rate is that of the last looks, which are about a second apart.
_LOOKS = 10
_P95 = 0.95
# A function that has no instance for longer starts late.
_LATE_S = 60.0


class Billed(NamedTuple):
    """What a function pays for: GPU memory over time, and the cost of all if there are prices."""

    gib_seconds: float = 0.0
    cost: str | None = None


_SHOWN_LETTERS = 100


class DeadLetterRows:
    """The dead letters of one queue; `why` is the reason when the queue cannot be read."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._seen: tuple[int, int] | None = None
        self._shown: Json = {"count": 0, "items": [], "why": ""}

    async def look(self) -> Json:
        """The number of dead letters, and the first of them."""
        tally = self._queue.tally
        now = (tally.dead, tally.dead_bytes)
        if now == self._seen:
            return self._shown
        try:
            letters = await self._queue.dead_letters(0, _SHOWN_LETTERS) if tally.dead else ()
        except QueueFailed as error:
            self._seen = None
            return {**self._shown, "count": tally.dead, "why": str(error)}
        self._seen = now
        items = [_letter(letter) for letter in letters]
        self._shown = {"count": tally.dead, "items": items, "why": ""}
        return self._shown

    async def replay(self, letter: int) -> None:
        self._seen = None
        await self._queue.replay(JobNumber(letter), self._queue.now_s())

    async def discard(self, letter: int) -> None:
        self._seen = None
        await self._queue.discard(JobNumber(letter))


def _letter(letter: DeadLetter) -> Json:
    return {
        "id": letter.number,
        "call": letter.call.id,
        "function": str(letter.call.function),
        "at": letter.died_at_s,
        "tries": letter.attempts,
        "why": letter.why,
    }


_NO_BILL = Billed()


class _Beside(NamedTuple):
    """What a row has beside what its function knows of itself."""

    lately: int  # calls since the first of the last looks
    late: bool
    gpu_s: float
    billed: Billed


class FunctionRows:
    """Makes the rows; `meters` counts the gateway's answers."""

    def __init__(self, functions: Iterable[Function], meters: GatewayMeters) -> None:
        self._functions = functions
        self._meters = meters
        # What each row was made of: while that stays equal, so does the row.
        self._seen: dict[str, tuple[object, ...]] = {}
        self._rows: dict[str, Json] = {}
        self._absent_since_s: dict[str, float] = {}  # those that want an instance and have none
        self._calls: deque[tuple[float, dict[str, int]]] = deque(maxlen=_LOOKS)

    def look(
        self, gpu_seconds: Mapping[str, float], billed: Mapping[str, Billed], now_s: float
    ) -> dict[str, Json]:
        """A row for each function by its id, in the ids' order; the others are by id too."""
        before_s, before = self._calls[0] if self._calls else (now_s, {})
        functions = {function.label: function for function in self._functions}
        self._absent_since_s = {
            label: self._absent_since_s.get(label, now_s)
            for label, function in functions.items()
            if function.wanted and not function.endpoints
        }
        seen: dict[str, tuple[object, ...]] = {}
        changed: dict[str, _Beside] = {}
        for label, function in functions.items():
            calls = function.calls
            beside = _Beside(
                max(0, calls - before.get(label, calls)),
                now_s - self._absent_since_s.get(label, now_s) > _LATE_S,
                gpu_seconds.get(label, 0.0),
                billed.get(label, _NO_BILL),
            )
            seen[label] = _parts(function, beside)
            if seen[label] != self._seen.get(label):
                changed[label] = beside
        self._calls.append((now_s, {label: one.calls for label, one in functions.items()}))
        rows = {label: row for label, row in self._rows.items() if label in seen}
        if changed:
            seconds, failures = self._meters.seconds(changed), self._meters.failures()
            for label, beside in changed.items():
                rate = beside.lately / (now_s - before_s) if now_s > before_s else 0.0
                p95_s = percentile(seconds.get(label, ()), _P95)
                rows[label] = _row(functions[label], beside, rate, failures[label], p95_s)
        if rows.keys() != self._rows.keys():
            rows = in_order(rows)
        self._seen, self._rows = seen, rows
        return rows


def _parts(function: Function, beside: _Beside) -> tuple[object, ...]:
    return (
        *beside,
        *(function.calls, function.inflight, function.waiting, function.wanted),
        *(function.endpoints, function.troubles, function.deployment),
        *(function.learned.models, function.learned.lines),
    )


def _row(
    function: Function, beside: _Beside, rate: float, errors: int, p95_s: float | None
) -> Json:
    return {
        "id": function.label,
        "name": function.id.name,
        "namespace": function.id.namespace,
        "gpu": function.options.gpu,
        "models": function.learned.models,
        "local": function.learned.lines,
        "replicas": len(function.endpoints),
        "wanted": function.wanted,
        "trouble": function.troubles.start,
        "part_trouble": function.troubles.partly,
        "dying": function.troubles.dying,
        "late": beside.late,
        "template_trouble": function.troubles.template,
        "log_command": function.id.log_command,
        "in_flight": function.inflight,
        "waiting": function.waiting,
        "calls": function.calls,
        "errors": errors,
        "rate": round(rate, 2),
        "p95_s": p95_s,
        "gpu_seconds": beside.gpu_s,
        "gpu_gib_seconds": beside.billed.gib_seconds,
        "cost": beside.billed.cost,
        "image": function.deployment.image,
    }


def percentile(counts: Sequence[int], share: float) -> float | None:
    """The quantile of the response times, within the histogram's resolution."""
    rank = share * sum(counts)
    if not rank:
        return None
    below, least_s = 0, 0.0
    for bound_s, count in zip(BOUNDS_S, counts, strict=False):
        if below + count >= rank:
            return round(least_s + (bound_s - least_s) * (rank - below) / count, 4)
        below, least_s = below + count, bound_s
    return float(BOUNDS_S[-1])
