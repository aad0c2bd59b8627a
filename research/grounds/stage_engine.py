"""ESG's testbed under a core, on virtual time: each stage of a call is a request of its own.

What a scheduler of workflows knows and the core does not, the rim does, as live: it divides what is
left of a call's time, and names the node where its data is. Every function is warm on every node,
as in ESG's experiments.
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from random import Random

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier
from research.esg.adaptive_planners import distribution
from research.esg.fitted_profiles import LEAST, EsgAssumptions
from research.esg.lane_plans import StageCall, WorkflowCall
from research.esg.printed import esg_paper
from scheduler.core.core import Core
from scheduler.model.actions import Dispatch, SetTimer
from scheduler.model.events import (
    Event,
    GpuSnapshot,
    ModelRegistered,
    NodeSnapshot,
    RequestArrived,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import (
    Configuration,
    GpuSpec,
    ModelSpec,
    Request,
    RequestId,
    SlotId,
    SlotSpec,
)

# The configurations of which the core knows the times: as many as it keeps of one model.
_KNOWN = tuple(
    Configuration(batch, vcpus, vgpus)
    for batch in (8, 4, 2, 1)
    for vgpus in (7, 4, 2, 1)
    for vcpus in (8, 4, 2, 1)
)
_MODEL_MB = 100
_LEAST_NOISE = 0.5


class StageEngine:
    """One core with one series of calls of ESG's applications."""

    def __init__(self, core: Core, assumed: EsgAssumptions, seed: int) -> None:
        self.ended: list[WorkflowCall] = []
        self.cost = 0.0
        self._core = core
        self._assumed = assumed
        self._paper = esg_paper()
        self._random = Random(f"noise {seed}")
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._calls: dict[RequestId, StageCall] = {}
        self._nodes: dict[str, int] = {}
        for number in range(self._paper.nodes):
            core.handle(self._node(number), 0.0)
        for name, row in self._paper.table3.items():
            spec = ModelSpec(ModelId(name), _MODEL_MB * MIB, {Tier.DISK: row.cold_ms / 1e3})
            core.handle(ModelRegistered(spec), 0.0)
            self._teach(ModelId(name))

    def run(self, calls: Sequence[WorkflowCall]) -> None:
        """Let these calls arrive, and go on until each has ended."""
        for call in calls:
            for first in call.entries():
                self._at(call.arrived_s, partial(self._arrives, first))
        while self._due:
            now, _, then = heappop(self._due)
            then(now)
        assert len(self.ended) == len(calls), "a call never ended"

    def _node(self, number: int) -> NodeSnapshot:
        node, gpu = NodeId(f"node{number:02d}"), GpuId(f"gpu{number:02d}")
        self._nodes[node] = number
        slots = tuple(SlotSpec(SlotId(f"{gpu}.{part}")) for part in range(self._paper.vgpus))
        room_mb = 2 * _MODEL_MB * len(self._paper.table3)
        spec = GpuSpec(gpu, node, room_mb * MIB, slots=slots, vcpus=self._paper.vcpus)
        warm = tuple((ModelId(name), _MODEL_MB * MIB) for name in self._paper.table3)
        return NodeSnapshot(node, (GpuSnapshot(spec, warm),))

    def _teach(self, model: ModelId) -> None:
        """The profile, as if each configuration had run once; the least one last."""
        slot, row = SlotId("gpu00.0"), self._paper.table3[model]
        for each in _KNOWN:
            ran = RunFinished(slot, model, each.batch, self._assumed.run_s(row, each), None, each)
            self._core.handle(ran, 0.0)

    def _at(self, at_s: float, then: Callable[[float], None]) -> None:
        self._order += 1
        heappush(self._due, (at_s, self._order, then))

    def _handle(self, event: Event, now: float) -> None:
        for action in self._core.handle(event, now):
            if isinstance(action, Dispatch):
                self._run(action, now)
            elif isinstance(action, SetTimer):
                self._at(action.at_s, partial(self._handle, action.event))

    def _arrives(self, call: StageCall, now: float) -> None:
        """A stage of a call arrives, with its share of the time that is left."""
        shares = distribution(call.application, self._assumed)
        stage = call.function
        left_s = max(0.0, call.due_s - now) * shares.shares[stage] / shares.rest[stage]
        request = Request(
            RequestId(f"c{call.call.number}.{call.stage}"),
            stage,
            (ModelId(stage),),
            application=call.application.name,
            stage=str(call.stage),
            slo_s=left_s,
            near=None if call.node is None else NodeId(f"node{call.node:02d}"),
        )
        self._calls[request.id] = call
        self._handle(RequestArrived(request), now)

    def _run(self, action: Dispatch, now: float) -> None:
        assert action.hit, "every function is warm everywhere"
        calls = [self._calls.pop(each) for each in action.requests]
        given = action.configuration or LEAST
        ran = Configuration(len(calls), given.vcpus, 1 + len(action.more_slots))
        row, node = self._paper.table3[action.models[0]], self._nodes[action.node]
        moved_s = 0.0
        for call in calls:
            for made in call.inputs:
                local = made in {None, node}
                moved_s += self._assumed.transfer_s(row.input_mb, local=local)
        noise = max(self._random.gauss(1.0, self._assumed.noise), _LEAST_NOISE)
        run_s = noise * self._assumed.run_s(row, ran)
        held_s = moved_s + run_s
        cost = self._paper.prices.cost(ran, held_s)
        self.cost += cost
        for call in calls:
            call.call.cost += cost / len(calls)
        self._at(now + held_s, partial(self._ends, action, ran, run_s, calls))

    def _ends(
        self,
        action: Dispatch,
        ran: Configuration,
        run_s: float,
        calls: Sequence[StageCall],
        now: float,
    ) -> None:
        model = action.models[0]
        self._handle(RunFinished(action.slot, model, ran.batch, run_s, None, ran), now)
        self._handle(SlotFreed(action.slot, action.lease), now)
        for call in calls:
            for following in call.call.after(call.function, self._nodes[action.node]):
                self._arrives(following, now)
            if call.call.is_over:
                call.call.ended_s = now
                self.ended.append(call.call)
