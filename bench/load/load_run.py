"""One load on a gateway: calls at given moments, or clients in a closed loop."""

import asyncio
import resource
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.load.arrivals import Arrival
from bench.load.http_callers import (
    NO_ANSWER,
    DueCall,
    GatewayCalls,
    LoadTarget,
    OnAnswer,
    OnRefusal,
)
from bench.load.pacing import PreciseTimer
from bench.load.statistics import CallTally

_LOOK_S = 0.25
_PAUSE_S = 0.2
_MOST_CONNECTIONS = 4_096
_SPARE_FILES = 64


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """The calls to make: either at `arrivals`, or by `clients` one after another.

    Clients call the functions of `choices` until the time or the choices end. `on_answer` gets the
    body of every answer, of whatever status, `on_refusal` the Retry-After of every refusal.
    """

    target: LoadTarget
    functions: tuple[str, ...]
    requests: list[bytes]
    seconds: float
    timeout_s: float
    arrivals: list[Arrival] = field(default_factory=list)
    clients: int = 0
    choices: Iterator[int] = field(default_factory=lambda: iter(()))
    on_answer: OnAnswer | None = None
    on_refusal: OnRefusal | None = None


@dataclass(slots=True)
class LoadOutcome:
    """The calls and their costs; `late_s` has the delay from due to begun of each call."""

    tally: CallTally
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    late_s: "array[float]" = field(default_factory=lambda: array("d"))
    stopped: bool = False


Watch = Callable[[LoadOutcome, int], None]


async def run(plan: TrafficPlan, stop: asyncio.Event, watch: Watch) -> LoadOutcome:
    """Run until the time is over and all calls have ended, or until `stop` is set.

    `watch` gets the outcome so far and the number of calls in flight, four times a second.
    """
    return await _LoadRun(plan, stop, watch).run()


class _LoadRun:
    def __init__(self, plan: TrafficPlan, stop: asyncio.Event, watch: Watch) -> None:
        self._plan = plan
        self._stop = stop
        self._watch = watch
        self._outcome = LoadOutcome(CallTally(plan.functions))
        self._callers = GatewayCalls(
            plan.target,
            plan.requests,
            self._ended,
            most=_connections(),
            timeout_s=plan.timeout_s,
            on_answer=plan.on_answer,
            on_refusal=plan.on_refusal,
        )
        self._next = 0
        self._sending = True
        self._done = asyncio.Event()

    async def run(self) -> LoadOutcome:
        """Run from the first call to the end of the last."""
        outcome = self._outcome
        cpu_s = time.process_time()
        self._began_s = time.monotonic()
        self._last_end_s = self._began_s
        clock = PreciseTimer(self._send_due)
        looking = asyncio.create_task(self._look())
        try:
            self._begin(clock)
            await self._wait_for_end()
        finally:
            clock.close()
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            self._sending = False
            await self._callers.close()
        outcome.stopped = self._stop.is_set()
        outcome.elapsed_s = max(self._last_end_s - self._began_s, 1e-9)
        outcome.cpu_s = time.process_time() - cpu_s
        return outcome

    def _begin(self, clock: PreciseTimer) -> None:
        if self._plan.clients:
            for _ in range(self._plan.clients):
                self._call_again()
        else:
            self._clock = clock
            self._send_due()

    async def _wait_for_end(self) -> None:
        """Wait until every call has been sent and has ended, or until `stop` is set."""
        waits = [asyncio.create_task(each.wait()) for each in (self._done, self._stop)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._callers.end_overdue()
            self._watch(self._outcome, self._callers.in_flight)

    # -- open loop -------------------------------------------------------------------------------

    def _send_due(self) -> None:
        """Send every call that is due, and set the clock for the next."""
        arrivals = self._plan.arrivals
        while self._next < len(arrivals):
            at_s, function = arrivals[self._next]
            due_s = self._began_s + at_s
            late_s = time.monotonic() - due_s
            if late_s < 0:
                self._clock.set(due_s)
                return
            self._next += 1
            self._outcome.late_s.append(late_s)
            self._send(DueCall(function, due_s))
        self._sending = False
        self._finish()

    # -- closed loop -----------------------------------------------------------------------------

    def _call_again(self) -> None:
        if self._stop.is_set():
            return
        now_s = time.monotonic()
        in_time = now_s - self._began_s < self._plan.seconds
        function = next(self._plan.choices, None) if in_time else None
        if function is None:
            self._sending = False
            self._finish()
        else:
            self._send(DueCall(function, now_s))

    # -- both ------------------------------------------------------------------------------------

    def _send(self, call: DueCall) -> None:
        self._outcome.tally.begun += 1
        self._callers.call(call)

    def _ended(self, call: DueCall, status: int, reason: str) -> None:
        self._last_end_s = now_s = time.monotonic()
        due_s = call.due_s - self._began_s
        self._outcome.tally.add(call.function, due_s, now_s - call.due_s, status, reason)
        if not self._plan.clients:
            self._finish()
        elif status == NO_ANSWER:  # an absent gateway is called again only after a pause
            asyncio.get_running_loop().call_later(_PAUSE_S, self._call_again)
        else:
            self._call_again()

    def _finish(self) -> None:
        if not self._sending and not self._outcome.tally.unfinished:
            self._done.set()


def _connections() -> int:
    """The connection limit; the limit on open files is raised as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + _SPARE_FILES
    if soft < wanted:
        soft = min(hard, wanted) if hard != resource.RLIM_INFINITY else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(_MOST_CONNECTIONS, soft - _SPARE_FILES))
