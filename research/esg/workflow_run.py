"""Applications on ESG's testbed, on virtual time: queues, searches, placements, batches."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from research.esg.applications import Application
from research.esg.fitted_profiles import LEAST, EsgAssumptions
from research.esg.lane_plans import LanePlan, LanePlanner, StageCall, WorkflowCall
from research.esg.node_choice import NodeChoice, NodeRoom
from research.esg.printed import EsgPaper, LoadLevel, esg_paper
from scheduler.cluster.view import home
from scheduler.model.values import Configuration

# A queue that no configuration could serve so often gets the least one.
MOST_ROUNDS = 3
# The weight of the latest interval.
WEIGHT = 0.3


@dataclass(slots=True)
class Instances:
    """A function's instances on one node; each runs one batch at a time.

    An idle instance holds neither vCPU nor vGPU, and ends after the keep-alive time.
    """

    idle_until_s: deque[float] = field(default_factory=deque)
    starting: int = 0

    def is_warm(self, now: float) -> bool:
        """Whether an idle instance is there; those whose time is up are forgotten."""
        while self.idle_until_s and self.idle_until_s[0] <= now:
            self.idle_until_s.popleft()
        return bool(self.idle_until_s)

    def take(self, now: float) -> bool:
        """Use the instance that became idle last; False: none is idle, and a cold start follows."""
        if self.is_warm(now):
            self.idle_until_s.pop()
            return True
        return False

    @property
    def ready(self) -> int:
        """Idle ones, and those already starting."""
        return len(self.idle_until_s) + self.starting


@dataclass(slots=True)
class EsgNode:
    """One node; taking more than is free is a defect of whoever takes it."""

    vcpus: int
    vgpus: int
    instances: dict[str, Instances]

    def room(self, function: str, now: float) -> NodeRoom:
        """What is free, as one function sees it."""
        return NodeRoom(self.vcpus, self.vgpus, self.instances[function].is_warm(now))

    def hold(self, configuration: Configuration) -> None:
        """Take these resources."""
        self.vcpus -= configuration.vcpus
        self.vgpus -= configuration.vgpus
        assert self.vcpus >= 0
        assert self.vgpus >= 0

    def free(self, configuration: Configuration) -> None:
        """Give these resources back."""
        self.vcpus += configuration.vcpus
        self.vgpus += configuration.vgpus


@dataclass(slots=True)
class RecheckList:
    """Queues that found no room, and how often they were tried again since."""

    most_rounds: int = MOST_ROUNDS
    _rounds: dict[Hashable, int] = field(default_factory=dict)

    def __contains__(self, queue: Hashable) -> bool:
        return queue in self._rounds

    def enter(self, queue: Hashable) -> None:
        """Remember a queue for which there was no room."""
        self._rounds.setdefault(queue, 0)

    def try_again(self, queue: Hashable) -> bool:
        """Count one more try; whether it is time for the least configuration."""
        self._rounds[queue] += 1
        return self._rounds[queue] > self.most_rounds

    def leave(self, queue: Hashable) -> None:
        """Forget a queue that was served."""
        self._rounds.pop(queue, None)


@dataclass(slots=True)
class IntervalForecast:
    """Exponentially weighted moving average of the intervals between invocations."""

    weight: float = WEIGHT
    last_s: float | None = None
    mean_s: float | None = None

    def observe(self, now: float) -> None:
        """An invocation came now."""
        if self.last_s is not None:
            interval_s = now - self.last_s
            known_s = interval_s if self.mean_s is None else self.mean_s
            self.mean_s = known_s + self.weight * (interval_s - known_s)
        self.last_s = now

    @property
    def next_s(self) -> float | None:
        """When the next invocation is expected; None before two have come."""
        if self.last_s is None or self.mean_s is None:
            return None
        return self.last_s + self.mean_s


def warms_another(forecast: IntervalForecast, ready: int, busy_until_s: float) -> bool:
    """Whether to start one more instance: the next call will find none idle.

    `ready` counts idle instances and those already starting.
    """
    expected_s = forecast.next_s
    return ready == 0 and expected_s is not None and expected_s < busy_until_s


# Gaussian noise is cut here: no run takes less than a part of its profiled time.
_LEAST_NOISE = 0.5


@dataclass(slots=True)
class RunTally:
    """What happened in one run, beside what each call says of itself."""

    batches: int = 0
    cold: int = 0
    local: int = 0
    moved: int = 0
    planned: int = 0
    missed: int = 0
    least: int = 0
    cost: float = 0.0
    batch_sizes: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class _Lane:
    """Calls that may run together, and what the scheduler is doing about them."""

    waiting: list[StageCall] = field(default_factory=list)
    searching: bool = False
    plan: LanePlan | None = None
    waits_until_s: float = 0.0  # it decided to wait, for so long or until one more call comes
    waits_with: int = 0


class WorkflowRun:
    """One scheduler with one series of calls."""

    def __init__(self, planner: LanePlanner, assumed: EsgAssumptions, seed: int) -> None:
        self.paper: EsgPaper = esg_paper()
        self.planner = planner
        self.assumed = assumed
        self.tally = RunTally()
        self.nodes = [self._node() for _ in range(self.paper.nodes)]
        self.ended: list[WorkflowCall] = []
        self._random = Random(f"noise {seed}")
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._timer_count = 0
        self._lanes: dict[Hashable, _Lane] = {}
        self._recheck = RecheckList(assumed.rounds)
        self._forecasts = {name: IntervalForecast() for name in self.paper.table3}
        self._turn = 0
        self._freed = False

    def run(self, calls: Sequence[WorkflowCall]) -> None:
        """Let these calls arrive, and go on until each has ended."""
        for call in calls:
            self._at(call.arrived_s, self._arrival(call))
        while self._timers:
            now, _, then = heappop(self._timers)
            then(now)
            while self._timers and self._timers[0][0] == now:
                heappop(self._timers)[2](now)
            self._visit(now)
        assert len(self.ended) == len(calls), "a call never ended"

    def _node(self) -> EsgNode:
        instances = {name: Instances() for name in self.paper.table3}
        for each in instances.values():
            each.idle_until_s.extend([self.paper.keep_alive_s] * self.assumed.warm)
        return EsgNode(self.paper.vcpus, self.paper.vgpus, instances)

    def _at(self, when_s: float, then: Callable[[float], None]) -> None:
        self._timer_count += 1
        heappush(self._timers, (when_s, self._timer_count, then))

    def _arrival(self, call: WorkflowCall) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            for entry in call.entries():
                self._enqueue(entry, now)

        return arrive

    def _enqueue(self, call: StageCall, now: float) -> None:
        self.planner.arrived(call, now)
        self._lanes.setdefault(self.planner.lane(call), _Lane()).waiting.append(call)

    def _visit(self, now: float) -> None:
        """A round of the controller over all lanes, then over those that found no room."""
        for name in self._in_turn(now):
            lane = self._lanes[name]
            while lane.waiting and not lane.searching and name not in self._recheck:
                if not self._look(name, lane, now):
                    break
        if self._freed:
            self._freed = False
            self._retry(now)

    def _in_turn(self, now: float) -> list[Hashable]:
        names = [name for name, lane in self._lanes.items() if lane.waiting]
        if not names:
            return names
        self._turn = (self._turn + 1) % len(names)
        names = names[self._turn :] + names[: self._turn]
        urgency = self.planner.urgency
        return sorted(names, key=lambda name: urgency(self._lanes[name].waiting, now))

    def _look(self, name: Hashable, lane: _Lane, now: float) -> bool:
        """Plan for one lane; whether a batch left it at once."""
        if now < lane.waits_until_s and len(lane.waiting) == lane.waits_with:
            return False
        plan = self.planner.plan(lane.waiting, now)
        if plan.wait_until_s is not None:
            assert plan.wait_until_s > now
            lane.waits_until_s, lane.waits_with = plan.wait_until_s, len(lane.waiting)
            self._at(plan.wait_until_s, lambda _now: None)
            return False
        lane.waits_until_s = 0.0
        if plan.search_s <= 0.0:
            return self._dispatch(name, lane, plan, now)
        lane.searching = True
        self._at(now + plan.search_s, lambda at_s: self._found(name, lane, plan, at_s))
        return False

    def _found(self, name: Hashable, lane: _Lane, plan: LanePlan, now: float) -> None:
        lane.searching = False
        self._dispatch(name, lane, plan, now)

    def _dispatch(self, name: Hashable, lane: _Lane, plan: LanePlan, now: float) -> bool:
        if self._placed(lane, plan, now):
            return True
        lane.plan = plan
        self._recheck.enter(name)
        return False

    def _retry(self, now: float) -> None:
        """Lanes that found no room: room was freed since."""
        names = [name for name in self._in_turn(now) if name in self._recheck]
        for name in names:
            lane = self._lanes[name]
            plan = lane.plan
            assert plan is not None
            if self.planner.replans:
                self._recheck.leave(name)
                while lane.waiting and self._look(name, lane, now):
                    pass
                continue
            if self._recheck.try_again(name) and plan.options != (LEAST,):
                self.tally.least += 1
                lane.plan = plan = plan._replace(options=(LEAST,))
            if self._placed(lane, plan, now):
                self._recheck.leave(name)

    def _placed(self, lane: _Lane, plan: LanePlan, now: float) -> bool:
        calls = plan.calls or lane.waiting
        function = calls[0].function
        rooms = [node.room(function, now) for node in self.nodes]
        choice = self.planner.place(plan, function, rooms, self._preferred(calls[0]))
        if choice is None:
            return False
        if plan.missed is not None:
            self.tally.planned += 1
            self.tally.missed += plan.missed
        batch = list(calls[: choice.configuration.batch])
        assert len(batch) == choice.configuration.batch
        taken = set(map(id, batch))
        lane.waiting = [call for call in lane.waiting if id(call) not in taken]
        self._start(batch, choice, now)
        return True

    def _preferred(self, call: StageCall) -> int:
        if call.node is not None:
            return call.node
        return home(call.application.name, call.function, len(self.nodes))

    def _start(self, batch: list[StageCall], choice: NodeChoice, now: float) -> None:
        there, configuration = self.nodes[choice.node], choice.configuration
        function = batch[0].function
        row = self.paper.table3[function]
        there.hold(configuration)
        instances = there.instances[function]
        cold_s = 0.0 if instances.take(now) else row.cold_ms / 1e3
        moved_s = sum(
            self.assumed.transfer_s(row.input_mb, local=node in {None, choice.node})
            for each in batch
            for node in each.inputs
        )
        noise = max(self._random.gauss(1.0, self.assumed.noise), _LEAST_NOISE)
        ends_s = now + cold_s + moved_s + noise * self.assumed.run_s(row, configuration)
        self._count(batch, choice, cold_s, ends_s - now)
        self._forecasts[function].observe(now)
        if warms_another(self._forecasts[function], instances.ready, ends_s):
            instances.starting += 1
            self._at(now + row.cold_ms / 1e3, self._warmed(instances))
        self._at(ends_s, lambda at_s: self._end(batch, choice, at_s))

    def _warmed(self, instances: Instances) -> Callable[[float], None]:
        def ready(now: float) -> None:
            instances.starting -= 1
            instances.idle_until_s.append(now + self.paper.keep_alive_s)

        return ready

    def _count(
        self, batch: list[StageCall], choice: NodeChoice, cold_s: float, held_s: float
    ) -> None:
        tally = self.tally
        tally.batches += 1
        tally.batch_sizes[len(batch)] += 1
        tally.cold += cold_s > 0.0
        cost = self.paper.prices.cost(choice.configuration, held_s)
        tally.cost += cost
        for each in batch:
            each.call.cost += cost / len(batch)
            made = [node for node in each.inputs if node is not None]
            tally.moved += len(made)
            tally.local += made.count(choice.node)

    def _end(self, batch: list[StageCall], choice: NodeChoice, now: float) -> None:
        node = self.nodes[choice.node]
        node.free(choice.configuration)
        node.instances[batch[0].function].idle_until_s.append(now + self.paper.keep_alive_s)
        self._freed = True
        for each in batch:
            call = each.call
            for begun in call.after(each.function, choice.node):
                self._enqueue(begun, now)
            if call.is_over:
                call.ended_s = now
                self.ended.append(call)


def calls_of(
    level: LoadLevel, many: int, seed: int, applications: Sequence[Application] = ()
) -> list[WorkflowCall]:
    """Calls of applications drawn at random, at intervals drawn from the level's range.

    The applications are ESG's, if no others are given; which conditions a call meets is drawn too.
    """
    paper, random = esg_paper(), Random(f"calls {seed}")
    conditions = Random(f"conditions {seed}")
    now, found = 0.0, []
    for number in range(many):
        now += random.uniform(*level.interval_ms) / 1e3
        application = random.choice(applications or paper.applications)
        slo_s = level.slo_of_l * paper.alone_s(application)
        unmet = frozenset(
            stage for stage, chance in application.chances if conditions.random() >= chance
        )
        found.append(WorkflowCall(application, number, now, slo_s, unmet))
    return found
