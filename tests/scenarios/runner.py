"""Plays a scenario: commands at the margin, and what the core answered below each, indented.

    policy lalbo3 o3_limit=3          the policy in force (the first line), or from now on
    rule lru                          the eviction rule, before anything else
    model bert 1024 load 2 run 1      size in MB, seconds
    model bert 1024 load 2 run 1 4:2  ... of which a batch of 4 runs together in 2 s
    gpu g0 8192                       a GPU of one slot joins; size in MB
    gpu g0 8192 slots 4 vcpus 16      ... of slots g0.0 to g0.3, with vCPUs for its leases
    gpu g0 8192 holds bert, gpt       ... with these models, the least recently used first
    pair g0 8192                      ... whose slot runs two leases at once; `holds` as above
    slows bert gpt 1.5                bert was seen to take so many times as long beside gpt
    at 1.5                            time goes on to this second
    request r0 bert                   a request for this model (or these models) arrives
    request r0 bert of app/stage slo 3     ... of a workflow's stage, which may take 3 s
    request r0 bert of app/stage slo 3 near g0      ... whose stage before ran on g0's node
    cancel r0 | expire r0             the caller goes away | the deadline passes
    free g0                           g0's manager ends its lease
    free g0 r1                        ... the one that it gave this request
    loaded bert g0                    bert is there: its load has ended
    drain g0 | lose g0 | lose g0 requeue
    silent g0 | heard g0              the way to g0's node breaks | is there again
    pin bert g0 | unpin bert g0 | evict bert g0 | prefetch bert g0
    # a remark

`pytest --rewrite` writes the answers of today into the file: read the difference before you commit.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from msgspec.structs import replace

from cache_manager.model.ids import MIB, GpuId, ModelId, Tier
from scheduler.composition import make_core
from scheduler.model.actions import (
    Action,
    Demote,
    Dispatch,
    EndLease,
    EnqueueLocally,
    Finish,
    Prepare,
    Refuse,
    SetTimer,
)
from scheduler.model.events import (
    DeadlinePassed,
    EvictAsked,
    GpuDraining,
    GpuJoined,
    GpuLost,
    GpuSnapshot,
    ModelLoaded,
    ModelRegistered,
    NodeHeard,
    NodeSilent,
    NodeSnapshot,
    PinAsked,
    PolicySet,
    PrefetchAsked,
    RequestArrived,
    RequestCancelled,
    SlotFreed,
    UnpinAsked,
)
from scheduler.model.values import ANY_GPU_TYPE, AfterLoss, GpuSpec, ModelSpec, RequestId, SlotId
from tests.kit.cores.builders import gpu, model, request
from tests.kit.cores.core_world import World

MARGIN = "    "


def commands_of(scenario: Path) -> list[str]:
    """The lines that are not answers."""
    lines = scenario.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith(MARGIN)]


def play(commands: list[str]) -> str:
    """The whole scenario as text, with the core's present answers."""
    stage = _Stage()
    lines: list[str] = []
    for command in commands:
        lines.append(command)
        words = command.split("#")[0].split()
        if words:
            lines += [MARGIN + line for line in stage.do(*words)]
    return "\n".join(lines) + "\n"


class _Stage:
    """One core, made by the first commands."""

    def __init__(self) -> None:
        self._rule = "lru"
        self._world: World | None = None
        self._models: dict[str, ModelSpec] = {}
        self._slowed: dict[tuple[ModelId, ModelId], float] = {}

    def do(self, verb: str, *words: str) -> list[str]:
        act: Callable[..., list[Action]] = getattr(self, f"_do_{verb}")
        return list(_told(act(*words)))

    @property
    def _there(self) -> World:
        assert self._world is not None, "a scenario begins with its policy"
        return self._world

    def _do_rule(self, name: str) -> list[Action]:
        self._rule = name
        return []

    def _do_policy(self, name: str, *settings: str) -> list[Action]:
        pairs = (setting.split("=") for setting in settings)
        parameters = {key: float(value) for key, value in pairs}
        if self._world is None:
            self._world = World(make_core(name, self._rule, parameters))
            return []
        return self._there.send(PolicySet(name, parameters))

    def _do_model(
        self, name: str, size: str, _load: str, load: str, _run: str, run: str, *batches: str
    ) -> list[Action]:
        alone: dict[tuple[int, str], float] = {(1, ANY_GPU_TYPE): float(run)}
        more = {
            (int(batch), ANY_GPU_TYPE): float(run_s)
            for batch, run_s in (each.split(":") for each in batches)
        }
        spec = model(name, memory_mb=int(size), load_s=float(load), run_s=alone | more)
        self._models[name] = spec
        return self._there.send(ModelRegistered(spec))

    def _do_gpu(self, name: str, size: str, *more: str) -> list[Action]:
        words = list(takewhile(lambda word: word != "holds", more))
        given = _pairs(words, "slots", "vcpus")
        slots, vcpus = int(given.get("slots", 1)), int(given.get("vcpus", 0))
        spec = gpu(name, memory_mb=int(size), slots=slots, vcpus=vcpus)
        return self._join(spec, more[len(words) :])

    def _do_pair(self, name: str, size: str, *holds: str) -> list[Action]:
        return self._join(gpu(name, memory_mb=int(size), leases=2, at_once=True), holds)

    def _do_slows(self, model: str, other: str, factor: str) -> list[Action]:
        """As runs would teach."""
        self._slowed[ModelId(model), ModelId(other)] = float(factor)
        self._there.core.cluster.profiles.predict_slowdowns(
            lambda model, _, leases: max(
                [self._slowed.get((model, name), 1.0) for lease in leases for name in lease]
            )
        )
        return []

    def _join(self, spec: GpuSpec, holds: tuple[str, ...]) -> list[Action]:
        if not holds:
            return self._there.send(GpuJoined(spec))
        return self._there.send(self._report(spec, " ".join(holds[1:]).split(", ")))

    def _report(self, spec: GpuSpec, holds: list[str]) -> NodeSnapshot:
        specs = [self._models[name] for name in holds]
        residents = tuple((each.id, each.memory_bytes or MIB) for each in specs)
        return NodeSnapshot(spec.node, (GpuSnapshot(spec, residents),))

    def _do_at(self, second: str) -> list[Action]:
        self._there.now = float(second)
        return []

    def _do_request(self, name: str, *words: str) -> list[Action]:
        models = list(takewhile(lambda word: word not in {"of", "slo", "near"}, words))
        given = _pairs(words[len(models) :], "of", "slo", "near")
        application, _, stage = given.get("of", "").partition("/")
        near = given.get("near")
        asked = request(name, *models, near=None if near is None else gpu(near).node)
        slo_s = float(given["slo"]) if "slo" in given else None
        function = f"function-of-{'-'.join(models)}"  # else no two requests could share a lease
        asked = replace(asked, function=function, application=application, stage=stage)
        return self._there.send(RequestArrived(replace(asked, slo_s=slo_s)))

    def _do_cancel(self, name: str) -> list[Action]:
        return self._there.send(RequestCancelled(RequestId(name)))

    def _do_expire(self, name: str) -> list[Action]:
        return self._there.send(DeadlinePassed(RequestId(name)))

    def _do_free(self, slot: str, holder: str = "") -> list[Action]:
        there = self._there
        lease = there.lease_of(holder) if holder else there.lease_on(slot)
        return there.send(SlotFreed(SlotId(slot), lease))

    def _do_loaded(self, name: str, there: str) -> list[Action]:
        load_s = self._models[name].load_s[Tier.ABSENT]
        return self._there.send(ModelLoaded(GpuId(there), ModelId(name), load_s, Tier.ABSENT))

    def _do_drain(self, name: str) -> list[Action]:
        return self._there.send(GpuDraining(GpuId(name)))

    def _do_lose(self, name: str, after: str = "fail") -> list[Action]:
        return self._there.send(GpuLost(GpuId(name), AfterLoss(after)))

    def _do_silent(self, name: str) -> list[Action]:
        return self._there.send(NodeSilent(gpu(name).node))

    def _do_heard(self, name: str) -> list[Action]:
        return self._there.send(NodeHeard(gpu(name).node))

    def _do_pin(self, name: str, there: str) -> list[Action]:
        return self._there.send(PinAsked(ModelId(name), GpuId(there)))

    def _do_unpin(self, name: str, there: str) -> list[Action]:
        return self._there.send(UnpinAsked(ModelId(name), GpuId(there)))

    def _do_evict(self, name: str, there: str) -> list[Action]:
        return self._there.send(EvictAsked(ModelId(name), GpuId(there)))

    def _do_prefetch(self, name: str, there: str) -> list[Action]:
        return self._there.send(PrefetchAsked(ModelId(name), GpuId(there)))


def _pairs(words: Sequence[str], *known: str) -> dict[str, str]:
    """The value behind each of these words."""
    found = dict(zip(words[::2], words[1::2], strict=True))
    assert set(found) <= set(known), f"{' '.join(words)}: {', '.join(known)} are known"
    return found


def _told(actions: list[Action]) -> Iterator[str]:
    """One line an action; a dispatch tells its preparation with it."""
    prepared: list[str] = []
    for action in actions:
        if isinstance(action, Prepare):
            loads = ", ".join(load.model for load in action.loads)
            victims = ", ".join(action.victims)
            how = "loads beside runs" if action.beside else "loads"
            prepared = [f"{how} {loads}", *([f"evicts {victims}"] if victims else [])]
            if action.prefetch:
                yield f"{action.slot} {'; '.join(prepared)}"
        elif isinstance(action, Dispatch):
            who = ", ".join(action.requests)
            how = "hit" if action.hit else "; ".join(["miss", *prepared])
            where = ", ".join([action.slot, *action.more_slots])
            if action.configuration is not None:
                batch, vcpus, vgpus = action.configuration
                how += f"; configured for {batch} on vCPUs: {vcpus}, slots: {vgpus}"
            yield f"{who} -> {where}, {how}  ({action.rule})"
        elif isinstance(action, EnqueueLocally):
            yield f"{action.request} -> local queue of {action.slot}  ({action.rule})"
        elif isinstance(action, Finish):
            yield f"{action.request} {action.outcome.value}"
        elif isinstance(action, Demote):
            yield f"{action.model} leaves {action.gpu}  ({action.reason})"
        elif isinstance(action, EndLease):
            yield f"{action.slot} is told to end its lease  ({action.reason})"
        elif isinstance(action, Refuse):
            yield f"refused: {action.reason}"
        elif isinstance(action, SetTimer):
            yield f"wake at {action.at_s:g}"
