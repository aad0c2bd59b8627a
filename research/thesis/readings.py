"""How a study reads points of the thesis that its text leaves open.

A reading at its default is what runs live. docs/decisions/0049 quotes the sentences.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from cache_manager import eviction
from cache_manager.model.ids import ModelId
from scheduler import policies
from scheduler.cluster.request_queue import Pending
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import View
from scheduler.composition import compose
from scheduler.core.core import Core
from scheduler.model.errors import BadParameter
from scheduler.model.values import CoreSettings, RequestId
from scheduler.policies import lalbo3
from scheduler.policies.placement_policy import Decision, Place, Policy, Queue
from scheduler.policies.rr import spread
from scheduler.sim.model_catalogue import original
from scheduler.sim.study import Scenario, Traffic
from scheduler.sim.workload import Workload

_LALB = {"lalb": 0, "lalbo3": lalbo3.Policy().o3_limit}


@dataclass(frozen=True, slots=True)
class Readings:
    """Each field is one reading; the defaults are the usual ones.

    - `spares_waiting`: a model that a local queue waits for is evicted last; else plain LRU.
    - `counts_dispatches`: a GPU's frequency counts requests that it runs; else that it is assigned.
    - `takes_first`: Algorithm 8 takes the first busy GPU that is soon enough; else the soonest.
    - `rro3_window`: RRO3 looks at so many requests of a local queue; 0 is all.
    - `shares_models`: functions beyond the 22 models share them; else each has weights of its own.
    - `held_when_loaded`: for false misses, a GPU holds what it has loaded; else also what it loads.
    - `while_arriving`: utilisation over the minutes in which requests arrive; else until the end.
    """

    spares_waiting: bool = True
    counts_dispatches: bool = False
    takes_first: bool = False
    rro3_window: int = 0
    shares_models: bool = False
    held_when_loaded: bool = False
    while_arriving: bool = False

    def __post_init__(self) -> None:
        if self.rro3_window < 0:
            raise BadParameter("rro3", "window", f"must be 0 or more, not {self.rro3_window}")

    def words(self) -> tuple[str, ...]:
        """The readings that are not the usual ones, in words."""
        said = {
            "plain LRU": not self.spares_waiting,
            "frequency of dispatches": self.counts_dispatches,
            "Algorithm 8's loop as printed": self.takes_first,
            f"RRO3 looking at {self.rro3_window}": self.rro3_window > 0,
            "shared models": self.shares_models,
            "models held once loaded": self.held_when_loaded,
            "utilisation while requests arrive": self.while_arriving,
        }
        return tuple(words for words, holds in said.items() if holds)

    def of_run(self, policy: str) -> "Readings":
        """Those of them that change a run of this policy, the others at their defaults."""
        has_local_queues = policy != "lb"
        return Readings(
            spares_waiting=self.spares_waiting or not has_local_queues,
            counts_dispatches=self.counts_dispatches and has_local_queues,
            takes_first=self.takes_first and policy in _LALB,
            rro3_window=self.rro3_window if policy == "rro3" else 0,
        )

    def core_settings(self, watched: Collection[RequestId] = ()) -> CoreSettings:
        """What the core is told; the decisions of `watched` requests are explained."""
        return CoreSettings(
            explain=frozenset(watched),
            spares_waiting=self.spares_waiting,
            counts_dispatches=self.counts_dispatches,
        )

    def policy(self, name: str, parameters: Mapping[str, float]) -> Policy:
        """The policy of that name, as it is read here."""
        usual = policies.make(name, parameters)
        if self.takes_first and name in _LALB:
            return _AsPrinted(int(parameters.get("o3_limit", _LALB[name])))
        if self.rro3_window and name == "rro3":
            return _Windowed(self.rro3_window)
        return usual


@dataclass(frozen=True, slots=True)
class ReadScenario(Scenario):
    """A run whose policy and core read the thesis in this way."""

    readings: Readings = field(default_factory=Readings)

    def core(self, watched: Collection[RequestId] = ()) -> Core:
        return compose(
            self.readings.policy(self.policy, self.parameters()),
            eviction.make(self.eviction),
            self.readings.core_settings(watched),
            policy_name=self.policy,
        )


@dataclass(frozen=True, slots=True)
class _AsPrinted:
    """LALB (a limit of 0) and LALBO3 with Algorithm 8's loop as it is printed."""

    o3_limit: int

    def decide(self, view: View) -> Iterator[Decision]:
        for decision in lalbo3.decide(view, self.o3_limit):
            if isinstance(decision, Queue):  # on the busy GPU that is free soonest
                first = _first_soon_enough(view, decision.request) or decision.slot
                yield Queue(decision.request, first, decision.rule)
            else:
                yield decision


def _first_soon_enough(view: View, request: Pending) -> Slot | None:
    """The loop of Algorithm 8 as it is printed, over a list of GPUs sorted by frequency."""
    load_s = view.nearest_load_s(request)  # in a study as long on every GPU
    soon = (slot for slot in view.busy_holders(request) if view.wait_s(slot) < load_s)
    return next(soon, None)


@dataclass(frozen=True, slots=True)
class _Windowed:
    """RRO3 that looks at the first requests of a local queue alone."""

    window: int

    def decide(self, view: View) -> Iterator[Decision]:
        yield from spread(view)
        for slot in view.idle_slots():
            hit = view.local_hit(slot)
            if hit is not None and slot.local.ahead_of(hit) >= self.window:
                hit = None
            request = hit or view.local_head(slot)
            if request is not None:
                rule = "hit in the local queue" if hit else "head of the local queue, no hit"
                yield Place((request,), slot, rule)


@dataclass(frozen=True, slots=True)
class SharedTraffic(Traffic):
    """Functions beyond the 22 models share them: requests name the originals of the copies."""

    def build(self, seed: int) -> Workload:
        own = Traffic.build(self, seed)
        models = [replace(model, id=ModelId(original(model.id))) for model in own.models]
        arrivals = tuple((at_s, ModelId(original(model))) for at_s, model in own.arrivals)
        return Workload(tuple(dict.fromkeys(models)), arrivals)
