"""One load on a gateway: calls when they are due, or so many clients in a closed loop."""

import asyncio
import resource
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpufaas.load.arrivals import Arrival
from gpufaas.load.calling import NO_ANSWER, Address, Call, Callers
from gpufaas.load.pacing import Clock
from gpufaas.load.tally import Tally

_LOOK_S = 0.25
_PAUSE_S = 0.2
_MOST_CONNECTIONS = 4_096
_SPARE_FILES = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done; either `arrivals` or `clients` says when.

    Clients call whom `choices` says, until the time is over or there is no choice left.
    """

    address: Address
    functions: tuple[str, ...]
    requests: list[bytes]
    seconds: float
    timeout_s: float
    arrivals: list[Arrival] = field(default_factory=list)
    clients: int = 0
    choices: Iterator[int] = field(default_factory=lambda: iter(()))


@dataclass(slots=True)
class Outcome:
    """What came of it; `late_s` is by how much each call was begun after it was due."""

    tally: Tally
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    late_s: "array[float]" = field(default_factory=lambda: array("d"))
    stopped: bool = False


Watch = Callable[[Outcome, int], None]


async def run(plan: Plan, stop: asyncio.Event, watch: Watch) -> Outcome:
    """Until the time is over and all calls have ended, or `stop` is set.

    `watch` is shown four times a second what came so far, and how many calls are in flight.
    """
    return await _Run(plan, stop, watch).run()


class _Run:
    def __init__(self, plan: Plan, stop: asyncio.Event, watch: Watch) -> None:
        self._plan = plan
        self._stop = stop
        self._watch = watch
        self._outcome = Outcome(Tally(plan.functions))
        self._callers = Callers(
            plan.address,
            plan.requests,
            self._ended,
            most=_connections(),
            timeout_s=plan.timeout_s,
        )
        self._next = 0
        self._sending = True
        self._done = asyncio.Event()

    async def run(self) -> Outcome:
        """From the first call to the end of the last."""
        outcome = self._outcome
        cpu_s = time.process_time()
        self._began_s = time.monotonic()
        self._last_end_s = self._began_s
        clock = Clock(self._send_due)
        looking = asyncio.create_task(self._look())
        try:
            self._begin(clock)
            await self._over()
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

    def _begin(self, clock: Clock) -> None:
        if self._plan.clients:
            for _ in range(self._plan.clients):
                self._call_again()
        else:
            self._clock = clock
            self._send_due()

    async def _over(self) -> None:
        """Both ends: nothing more is to be sent, and all of it has been answered."""
        waits = [asyncio.create_task(each.wait()) for each in (self._done, self._stop)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._callers.give_up_late()
            self._watch(self._outcome, self._callers.in_flight)

    # -- open loop -------------------------------------------------------------------------------

    def _send_due(self) -> None:
        """All that is due by now; the clock rings for the next."""
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
            self._send(Call(function, due_s))
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
            self._send(Call(function, now_s))

    # -- both ------------------------------------------------------------------------------------

    def _send(self, call: Call) -> None:
        self._outcome.tally.begun += 1
        self._callers.call(call)

    def _ended(self, call: Call, status: int, why: str) -> None:
        self._last_end_s = now_s = time.monotonic()
        due_s = call.due_s - self._began_s
        self._outcome.tally.add(call.function, due_s, now_s - call.due_s, status, why)
        if not self._plan.clients:
            self._finish()
        elif status == NO_ANSWER:  # whoever is not there is not asked without pause
            asyncio.get_running_loop().call_later(_PAUSE_S, self._call_again)
        else:
            self._call_again()

    def _finish(self) -> None:
        if not self._sending and not self._outcome.tally.unfinished:
            self._done.set()


def _connections() -> int:
    """How many there may be at once; the limit on open files is raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + _SPARE_FILES
    if soft < wanted:
        soft = min(hard, wanted) if hard != resource.RLIM_INFINITY else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(_MOST_CONNECTIONS, soft - _SPARE_FILES))
