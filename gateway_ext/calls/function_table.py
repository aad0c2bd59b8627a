"""The deployed functions, their instances, and their calls: which instance gets the next one."""

import asyncio
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.telemetry.stranger_log import StrangerLog
from common.time_limits import time_limit
from gateway_ext.calls.learned import CallWaits, GpuReport, Learned
from gateway_ext.calls.passed_headers import RequestHeaders
from gateway_ext.errors import Busy, GatewayError, NoInstance, UnknownFunction
from gateway_ext.metrics import FunctionLoad
from gateway_ext.model import (
    DEFAULT_NAMESPACE,
    NO_TROUBLES,
    Deployment,
    Endpoint,
    FunctionId,
    Troubles,
)
from gateway_ext.openfaas import function_options
from gateway_ext.tracing.journey import Journey

# Were calls let in that wait for all of their time limit, all of them would be worked on in vain.
_WAIT_SHARE = 0.5
# An instance that says how many calls it serves at a time has so many times as many; the others
# wait here, in their order. In the instance they would hold connections, and the instance reads
# those in any order while it is busy.
_CALLS_FOR_A_THREAD = 4

_log = logging.getLogger(__name__)

_TAKES_TURNS = b"1"

OptionsOf = Callable[[Deployment], function_options.FunctionOptions]


class Instance:
    """One endpoint of a function, and the number of its calls in flight.

    `unanswered` counts those that the instance has whole, and has not begun to answer. It is
    doubted from a call that broke off until it answers: `doubted_since_s` (monotonic), else 0.
    """

    __slots__ = (
        "address", "doubted_since_s", "empty", "endpoint", "inflight", "prefix", "unanswered",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.address = endpoint.address
        self.doubted_since_s = 0.0
        self.prefix = endpoint.prefix.rstrip("/").encode()
        self.inflight = 0
        self.unanswered = 0
        self.empty = asyncio.Event()  # set while no call is in flight
        self.empty.set()

    def freed(self) -> None:
        self.inflight -= 1
        if not self.inflight:
            self.empty.set()


class Function:
    """One function as it is deployed now; it stays the same object through updates.

    `calls` is the number of calls so far, `last_call_s` when the last call began or ended
    (monotonic); `log` has lines about its calls, which strangers make. It `tells_instances_apart`
    if each address is one instance: behind another gateway all have the same.
    """

    __slots__ = (
        "id", "label", "deployment", "options", "endpoints", "wanted", "troubles", "inflight",
        "unanswered", "calls", "last_call_s", "gone", "learned", "log", "waits",
        "tells_instances_apart",
        "_instances", "_next", "_turns", "_ready",
    )  # fmt: skip

    def __init__(self, deployment: Deployment, options: function_options.FunctionOptions) -> None:
        self.id = deployment.id
        self.label = str(deployment.id)
        self.deployment = deployment
        self.options = options
        self.endpoints: tuple[Endpoint, ...] = ()
        self.wanted = 0
        self.troubles = NO_TROUBLES
        self.inflight = 0
        self.unanswered = 0
        self.calls = 0
        self.last_call_s = time.monotonic()
        self.gone = False
        self.learned = Learned(self.id, options.models)
        self.log = StrangerLog(_log)
        self.waits = CallWaits()
        self.tells_instances_apart = True
        self._instances: list[Instance] = []
        self._next = 0
        self._turns: deque[asyncio.Future[Instance]] = deque()  # of waiting calls, in order
        self._ready = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._turns)

    @property
    def expected_wait_s(self) -> float:
        """How long a call that arrives now should wait for its turn; 0 if that is not known."""
        if not self.waits.known or not self._instances:
            return 0.0
        instances = len(self._instances)
        return self.waits.expected_s(len(self._turns), self.unanswered, instances, time.monotonic())

    @property
    def reads_ahead(self) -> bool:
        """Whether a call takes its place only with its body: a slow caller must hold none."""
        return self.options.gpu or self._places is not None

    @property
    def most_wait_s(self) -> float:
        """How long a call may wait for its turn; the rest of its time limit is for its answer."""
        return min(self.options.max_wait_s, _WAIT_SHARE * self.options.timeout_s)

    def check_wait(self) -> None:
        """Busy if a call that arrives now would wait for too long."""
        wait_s = self.expected_wait_s
        if wait_s > self.most_wait_s:
            raise Busy(self.id, wait_s, f"is busy: calls before this one need {wait_s:.1f} s")

    def called(self) -> None:
        self.calls += 1
        self.last_call_s = time.monotonic()

    async def ready(self, within_s: float) -> bool:
        """Whether there is an instance now, or within that time."""
        try:
            async with time_limit(within_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return not self.gone

    def take(self, avoid: Collection[Instance] = (), preferred: str = "") -> Instance | None:
        """The instance with the fewest calls, counting one more; None if the call has to wait.

        Instances to `avoid` are taken only if there is no other, and the one at the `preferred`
        address before others with as many calls.
        """
        if self._turns:
            return None
        return self._take(avoid, preferred)

    async def turn(self, most_waking: int) -> Instance:
        """Wait for an instance behind all waiting calls; Busy if too many calls wait."""
        if self.gone:  # while the call's body arrived, or since it was tried
            raise UnknownFunction(self.id)
        if not self._instances:  # waits for a start say nothing about those for a turn
            if self.troubles.start:
                raise self._does_not_start()
            return await self._wait(most_waking)
        ahead, began_s = len(self._turns), time.monotonic()
        # Without a limit of its own, a function bounds the wait, and not how many calls wait.
        most = sys.maxsize if self.options.concurrency is None else self.options.queue
        instance = await self._wait(most, self.expected_wait_s)
        waited_s, instances = time.monotonic() - began_s, max(1, len(self._instances))
        places = instances * (self._places or 1)
        self.waits.saw_turn(ahead, waited_s, instances, places)
        return instance

    def answered(self, instance: Instance) -> None:
        self.unanswered -= 1
        instance.unanswered -= 1
        self._hand_out()

    def give_back(self, instance: Instance, *, answered: bool = False) -> None:
        if not answered:
            self.unanswered -= 1
            instance.unanswered -= 1
        self.inflight -= 1
        instance.freed()
        self.last_call_s = time.monotonic()
        self._hand_out()

    @property
    def instances(self) -> Sequence[Instance]:
        return self._instances

    def become(
        self,
        deployment: Deployment,
        options: function_options.FunctionOptions,
        endpoints: Sequence[Endpoint],
        troubles: Troubles = NO_TROUBLES,
    ) -> list[Instance]:
        """Return the instances that take no new call."""
        if deployment != self.deployment:
            self.learned = Learned(self.id, options.models)
            self.waits = CallWaits()
        self.deployment, self.options, self.troubles = deployment, options, troubles
        self.endpoints = tuple(endpoints)
        addresses = {endpoint.address for endpoint in endpoints if not endpoint.prefix}
        self.tells_instances_apart = len(addresses) == len(endpoints)
        old = {instance.endpoint: instance for instance in self._instances}
        self._instances = [
            old[endpoint] if endpoint in old else Instance(endpoint) for endpoint in self.endpoints
        ]
        if self._instances:
            self._ready.set()
            self._hand_out()
        else:
            self._ready.clear()
            if troubles.start:
                self._fail_turns(self._does_not_start())
        return [instance for instance in old.values() if instance not in self._instances]

    def leave(self) -> list[Instance]:
        """The function was removed: waiting calls fail."""
        left, self._instances = self._instances, []
        self.gone = True
        self.endpoints = ()
        self._ready.set()
        self._fail_turns(UnknownFunction(self.id))
        return left

    def _does_not_start(self) -> NoInstance:
        """The answer to a call that nothing can be expected to serve; the cause may be a secret."""
        why = self.troubles.start if self.options.shows_errors else "it does not start"
        return NoInstance(self.id, f"{why}; its log: {self.id.log_command}")

    def did_not_start(self, within_s: float) -> NoInstance:
        why, slow = f"none came within {within_s:g} s", self.troubles.slow
        if slow is not None:
            for_s = asyncio.get_running_loop().time() - slow.began_s
            why += f": {slow.what}, for {for_s:.0f} s"
        return NoInstance(self.id, f"{why}; its log: {self.id.log_command}")

    async def _wait(self, most: int, expected_s: float = 0.0) -> Instance:
        """Wait until an instance is assigned; Busy if `most` calls wait already.

        A call that is refused should come again after `expected_s`.
        """
        if len(self._turns) >= most:
            raise Busy(self.id, expected_s)
        turn: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back(turn.result())  # assigned while the call was being cancelled
            elif turn in self._turns:
                self._turns.remove(turn)
            raise

    def _hand_out(self) -> None:
        turns = self._turns
        while turns:
            if turns[0].done():
                turns.popleft()
                continue
            instance = self._take()
            if instance is None:
                return
            turns.popleft().set_result(instance)

    def _fail_turns(self, error: GatewayError) -> None:
        """Raise this error in every waiting call: no instance will be assigned."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _take(self, avoid: Collection[Instance] = (), preferred: str = "") -> Instance | None:
        instances = self._instances
        count = len(instances)
        if not count:
            return None
        best = instances[0] if count == 1 else self._least_busy(avoid, preferred)
        if self._is_full(best):
            return None
        best.empty.clear()
        best.inflight += 1
        self.inflight += 1
        best.unanswered += 1
        self.unanswered += 1
        return best

    @property
    def _places(self) -> int | None:
        """The calls that an instance may have; None for any number.

        The scheduler must see all calls that want a GPU, so these wait in the instance's places.
        """
        if self.options.concurrency is not None:
            return self.options.concurrency
        at_a_time = 0 if self.options.gpu else self.waits.at_a_time
        return _CALLS_FOR_A_THREAD * at_a_time or None

    def _is_full(self, instance: Instance) -> bool:
        if self.options.concurrency is not None:
            return instance.inflight >= self.options.concurrency
        places = self._places
        return places is not None and instance.unanswered >= places

    def _least_busy(self, avoid: Collection[Instance], preferred: str) -> Instance:
        """The instance with the fewest calls; of equal ones the next after the last one found.

        One with a free place comes before one without, and the preferred one before its equals.
        Where the handler is given calls together, one batch is filled before the next instance.
        """
        together = self.options.batches.most
        instances = self._instances
        count = len(instances)

        def rank(at: int) -> tuple[bool, bool, int, int, bool]:
            instance = instances[at % count]
            calls = instance.inflight
            batches, free = _filling(calls, together) if together > 1 else (calls, 0)
            is_other = instance.address != preferred
            return instance in avoid, self._is_full(instance), batches, free, is_other

        best_at = min(range(self._next, self._next + count), key=rank) % count
        self._next = best_at + 1
        return instances[best_at]


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
    takes_turns: bool = False  # as its last answer says
    spared_gpu: bool = False  # its last answer says that it has used none
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

    def learn(self, report: GpuReport, answered_in_s: float = 0.0) -> None:
        function, attempt = self.function, self.journey.attempts[-1]
        if report.trace:
            attempt.keep_report(report.trace)
            if attempt.ahead >= function.waits.at_a_time:
                function.waits.saw_report(attempt.ahead, report.trace, answered_in_s)
        self.takes_turns = report.turns == _TAKES_TURNS and function.tells_instances_apart
        self.spared_gpu = self.takes_turns and not report.models
        if report.models:
            function.learned.saw(report.models)
        if report.local:
            function.learned.saw_local(report.local)


class Functions:
    """All functions, by the name in a request's path; a provider's listener.

    `on_change` is called with every function that changed or was removed.
    """

    def __init__(
        self,
        on_change: Callable[[Function], None] | None = None,
        options_of: OptionsOf = function_options.of,
    ) -> None:
        self._on_change = on_change
        self._options_of = options_of
        self._by_id: dict[FunctionId, Function] = {}
        self._by_path: dict[bytes, Function] = {}
        # Instances that take no new call but still serve some.
        self._leaving: list[Instance] = []

    def __iter__(self) -> Iterator[Function]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def loads(self) -> Iterator[FunctionLoad]:
        for function in self:
            ready, inflight = len(function.instances), function.inflight
            wait_s = function.expected_wait_s
            yield FunctionLoad(function.label, ready, inflight, function.waiting, wait_s)

    def by_path(self, name: bytes) -> Function | None:
        """The function of the path segment `name` or `name.namespace`."""
        return self._by_path.get(name)

    def id_by_path(self, name: bytes) -> FunctionId | None:
        function = self._by_path.get(name)
        return None if function is None else function.id

    def by_id(self, function: FunctionId) -> Function | None:
        return self._by_id.get(function)

    def function_is(
        self,
        deployment: Deployment,
        endpoints: Sequence[Endpoint],
        *,
        wanted: int,
        troubles: Troubles = NO_TROUBLES,
    ) -> None:
        function = self._by_id.get(deployment.id)
        if function is None:
            options = self._options_of(deployment)
            function = self._by_id[deployment.id] = Function(deployment, options)
            self._by_path.update(dict.fromkeys(_paths(deployment.id), function))
        elif deployment == function.deployment:
            options = function.options
        else:
            options = self._options_of(deployment)
        function.wanted = wanted
        self._retire(function.become(deployment, options, endpoints, troubles))
        self._changed(function)

    def function_gone(self, function: FunctionId) -> None:
        left = self._by_id.pop(function, None)
        if left is None:
            return
        for path in _paths(function):
            del self._by_path[path]
        left.wanted = 0
        self._retire(left.leave())
        self._changed(left)

    async def drained(self, instances: Iterable[str], within_s: float) -> bool:
        """Wait until none of these instances has a call; False after `within_s`."""
        names = set(instances)
        present = (instance for function in self._by_id.values() for instance in function.instances)
        waited = [
            instance
            for instance in (*self._leaving, *present)
            if instance.endpoint.instance in names
        ]
        try:
            async with time_limit(within_s):
                for instance in waited:
                    while instance.inflight:
                        await instance.empty.wait()
        except TimeoutError:
            return False
        self._retire([])
        return True

    def _retire(self, instances: Iterable[Instance]) -> None:
        self._leaving = [instance for instance in (*self._leaving, *instances) if instance.inflight]

    def _changed(self, function: Function) -> None:
        if self._on_change is not None:
            self._on_change(function)


def _filling(calls: int, together: int) -> tuple[int, int]:
    """The rank of an instance with so many calls: fewest whole batches, then the fullest one."""
    return calls // together, -(calls % together)


def _paths(function: FunctionId) -> tuple[bytes, ...]:
    full = str(function).encode()
    short = function.name.encode()
    return (full, short) if function.namespace == DEFAULT_NAMESPACE else (full,)
