"""A large cluster in simulated time: gateways, nodes that obey, and the scheduler's own core."""

import random
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate

from bench.scale.message_counts import Message, MessageCounts
from bench.scale.simulated_gateways import SimulatedGateway
from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier
from scheduler.composition import make_core
from scheduler.model.actions import Action, Demote, Dispatch, EndLease, Prepare, Recall, SetTimer
from scheduler.model.events import Event, GpuJoined, ModelLoaded, ModelRegistered, SlotFreed
from scheduler.model.values import (
    ANY_GPU_TYPE,
    CoreSettings,
    GpuSpec,
    LeaseId,
    ModelSpec,
    StandingTerms,
)

_GPU_BYTES, _MODEL_BYTES = 80_000 * MIB, 16_000 * MIB
_LOAD_S = 2.0
# A node ends a lease, and reports the runs of each busy slot, after so long.
_ENDING_S, _RUNS_S = 0.001, 0.1
_GPUS_A_NODE = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What is simulated: sizes, and calls a second; the functions' shares fall as 1/rank."""

    gpus: int = 10_000
    gateways: int = 20
    functions: int = 2_000
    calls: int = 100_000
    run_s: float = 0.06
    policy: str = "lalbo3"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What happened in the seconds that were counted."""

    seconds: float
    counts: MessageCounts
    calls: int
    under_kept: int
    waited_s: float
    core_s: float
    events: int


class LargeCluster:
    """Runs one shape; `standing` are the terms of kept leases, None for one call a lease."""

    def __init__(self, shape: Shape, standing: StandingTerms | None) -> None:
        self._shape = shape
        self._random = random.Random(7)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._now = 0.0
        self._core = make_core(shape.policy, settings=CoreSettings(standing=standing))
        self._core_s = 0.0
        self._events = 0
        self._loaded_s: dict[tuple[GpuId, ModelId], float] = {}
        self._callers: dict[LeaseId, SimulatedGateway] = {}
        self._ended: set[LeaseId] = set()
        self.counts = MessageCounts()
        self._gateways = {
            f"gateway{n}": SimulatedGateway(
                f"gateway{n}", self._at, self._send, self.counts, self._run_s
            )
            for n in range(shape.gateways)
        }
        weights = [1.0 / (rank + 1) for rank in range(shape.functions)]
        self._shares = list(accumulate(weights))
        self._requests: dict[str, str] = {}

    def run(self, warm_s: float, seconds: float) -> Traffic:
        """Let calls come for this long, and count what happens after the warming."""
        for function in range(self._shape.functions):
            times = {Tier.ABSENT: _LOAD_S, Tier.HOST: _LOAD_S / 4, Tier.DISK: _LOAD_S}
            runs = ((1, ANY_GPU_TYPE, self._shape.run_s),)
            model = ModelSpec(ModelId(f"m{function}"), _MODEL_BYTES, times, runs)
            self._handle(ModelRegistered(model))
        for gpu in range(self._shape.gpus):
            node = NodeId(f"n{gpu // _GPUS_A_NODE}")
            self._handle(GpuJoined(GpuSpec(GpuId(f"g{gpu}"), node, _GPU_BYTES)))
        self._at(0.0, self._arrive)
        self._at(0.0, self._report_runs)
        self._until(warm_s)
        before = self._totals()
        self._core_s, self._events, self.counts.counting = 0.0, 0, True
        self._until(warm_s + seconds)
        total = self._totals()
        calls, kept, waited_s = (total[key] - before[key] for key in ("calls", "kept", "waited"))
        return Traffic(
            seconds, self.counts, int(calls), int(kept), waited_s, self._core_s, self._events
        )

    def _totals(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for gateway in self._gateways.values():
            found["calls"] += gateway.served
            found["kept"] += gateway.under_kept
            found["waited"] += gateway.waited_s  # type: ignore[assignment]  # seconds
        return found

    # -- time -------------------------------------------------------------------------------------

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        self._order += 1
        heappush(self._heap, (when_s, self._order, what))

    def _until(self, end_s: float) -> None:
        while self._heap and self._heap[0][0] < end_s:
            self._now, _, what = heappop(self._heap)
            for gateway in self._gateways.values():
                gateway.now = self._now
            what()

    # -- calls ------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        chosen = bisect(self._shares, self._random.random() * self._shares[-1])
        gateway = self._gateways[f"gateway{self._random.randrange(self._shape.gateways)}"]
        gateway.call(f"f{chosen}", ModelId(f"m{chosen}"))
        self._at(self._now + self._random.expovariate(self._shape.calls), self._arrive)

    def _run_s(self) -> float:
        return self._random.expovariate(1.0 / self._shape.run_s)

    # -- the leader and the nodes -----------------------------------------------------------------

    def _send(self, event: Event) -> None:
        self._at(self._now, lambda: self._handle(event))

    def _handle(self, event: Event) -> None:
        self._events += 1
        began_s = time.perf_counter()
        actions = self._core.handle(event, self._now)
        self._core_s += time.perf_counter() - began_s
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            self.counts.add(Message.ORDER)
            self._grant(action)
        elif isinstance(action, Prepare):
            self.counts.add(Message.ORDER)
            for load in action.loads:
                done_s = self._now + _LOAD_S
                self._loaded_s[action.gpu, load.model] = done_s
                loaded = ModelLoaded(action.gpu, load.model, _LOAD_S, load.source)
                self._at(done_s, partial(self._report, loaded))
        elif isinstance(action, EndLease):
            self.counts.add(Message.ORDER)
            freed = SlotFreed(action.slot, action.lease)
            if action.lease not in self._ended:
                self._ended.add(action.lease)
                self._at(self._now + _ENDING_S, lambda: self._report(freed))
        elif isinstance(action, Recall):
            caller = self._callers.get(action.lease)
            if caller is not None:
                caller.recalled(action.lease)
        elif isinstance(action, SetTimer):
            self._at(action.at_s, lambda: self._handle(action.event))
        elif isinstance(action, Demote):
            self.counts.add(Message.ORDER)

    def _grant(self, action: Dispatch) -> None:
        ready_s = max(
            (self._loaded_s.get((action.gpu, model), 0.0) for model in action.models), default=0.0
        )
        for request in action.requests:
            gateway = self._gateways[request.partition(".")[0]]
            self._callers[action.lease] = gateway
            gateway.granted(request, action.lease, action.stands, ready_s)

    def _report(self, event: Event) -> None:
        self.counts.add(Message.NODE_REPORT)
        self._handle(event)

    def _report_runs(self) -> None:
        """Each busy slot reports the mean of its runs; it changes no decision here."""
        busy = len(self._core.leases)
        self.counts.add(Message.NODE_REPORT, busy)
        self._at(self._now + _RUNS_S, self._report_runs)
