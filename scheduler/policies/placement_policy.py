"""What a policy can read, what it may decide, and the bounds of its parameters."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

from cache_manager.model.ids import GpuId, ModelId
from scheduler.model.errors import BadParameter
from scheduler.model.values import Configuration, RequestId, SlotId


class RequestView(Protocol):
    """One waiting request, read only."""

    @property
    def id(self) -> RequestId: ...
    @property
    def models(self) -> tuple[ModelId, ...]: ...
    @property
    def arrived_s(self) -> float: ...
    @property
    def function(self) -> str:
        """Whose request it is: requests of one function alone can share a lease."""

    @property
    def application(self) -> str:
        """Of which workflow it is a part; empty: of none."""

    @property
    def stage(self) -> str: ...
    @property
    def slo_s(self) -> float | None:
        """The seconds from its arrival within which it should be done, if it says so."""


class SlotView(Protocol):
    """One slot, read only."""

    @property
    def id(self) -> SlotId: ...
    @property
    def idle(self) -> bool:
        """Whether it has room for another lease."""

    @property
    def loadable(self) -> bool:
        """Whether a load could begin beside its runs, idle or not."""

    @property
    def frequency(self) -> int:
        """How many requests it was given."""


# Decisions are classes where they are made for every placement: made fastest, compiled.
class Place:
    """Give these requests of the same models to a slot with room, now.

    Those of another function than the first one go on waiting: they cannot share its lease.
    Their lease occupies `more_slots` with room on the same GPU too, and has what vCPUs the
    configuration says, if the GPU's manager takes one.
    """

    __slots__ = ("configuration", "more_slots", "requests", "rule", "slot")

    def __init__(
        self,
        requests: Sequence[RequestView],
        slot: SlotView,
        rule: str,
        configuration: Configuration | None = None,
        more_slots: Sequence[SlotView] = (),
    ) -> None:
        self.requests = requests
        self.slot = slot
        self.rule = rule
        self.configuration = configuration
        self.more_slots = more_slots


class LoadBeside:
    """Load what these requests of the same models lack, beside the runs of a slot that is loadable.

    Their lease takes the GPU's copy engine at once, and the slot's compute when the models are
    there; meanwhile the slot serves others.
    """

    __slots__ = ("requests", "rule", "slot")

    def __init__(self, requests: Sequence[RequestView], slot: SlotView, rule: str) -> None:
        self.requests = requests
        self.slot = slot
        self.rule = rule


class Queue:
    """Let a request wait for this one slot."""

    __slots__ = ("request", "rule", "slot")

    def __init__(self, request: RequestView, slot: SlotView, rule: str) -> None:
        self.request = request
        self.slot = slot
        self.rule = rule


class Skip:
    """Count one visit of every waiting request before `before` (of all, where it is None)."""

    __slots__ = ("before", "limit")

    def __init__(self, before: RequestView | None, limit: int) -> None:
        self.before = before
        self.limit = limit


class Prefetch(NamedTuple):
    """Load a model onto an idle slot ahead of its requests."""

    model: ModelId
    slot: SlotView


class Wake(NamedTuple):
    """Run the policy again at this time, even if nothing has happened."""

    at_s: float


class GpuRoom(NamedTuple):
    """One GPU's slots, those of them that are idle, and its virtual CPUs: all, and unused ones.

    Without vCPUs, its leases are given none.
    """

    gpu: GpuId
    slots: int
    idle: Sequence[SlotView]
    vcpus: int
    free_vcpus: int


class ModelFacts(NamedTuple):
    """What is known of a model over the whole cluster."""

    load_s: float
    run_s: float
    rate: float
    copies: int


Decision = Place | LoadBeside | Queue | Skip | Prefetch | Wake


class View(Protocol):
    """The core's state as a policy may see it: always current, never to be changed.

    Every question costs at most the logarithm of the cluster, or one GPU's residents; where models
    are pinned or a GPU is shared, at most a look at each set of models that waits.
    """

    @property
    def now(self) -> float: ...

    # -- slots ----------------------------------------------------------------------------------

    def idle_slots(self) -> Iterator[SlotView]:
        """Slots with room, least used first, while something waits that they could take.

        A slot that was given nothing is not offered again in this run.
        """

    def least_used(self, request: RequestView) -> SlotView | None:
        """The least used slot, idle or not, whose GPU could hold the request's models."""

    def idle_holder(self, request: RequestView) -> SlotView | None:
        """The least used idle slot that holds all the request's models."""

    def busy_holder(self, request: RequestView) -> SlotView | None:
        """The slot that holds all the request's models, and could begin it soonest but not now.

        It is busy, or a model is still on its way there, loaded beside the runs of others.
        """

    def busy_holders(self, request: RequestView) -> Sequence[SlotView]:
        """All busy slots that hold all the request's models, least used first; costs a sort."""

    def is_hit(self, request: RequestView, slot: SlotView) -> bool:
        """Whether the slot's GPU holds all the request's models."""

    def wait_s(self, slot: SlotView) -> float:
        """Seconds until the slot could begin one more request: its finish time."""

    def begins_s(self, request: RequestView, slot: SlotView) -> float:
        """Seconds until the slot, which holds the request's models, could begin it.

        It is `wait_s`, or longer if a model is still on its way there.
        """

    def copy_wait_s(self, slot: SlotView) -> float:
        """Seconds until the copy engine of the slot's GPU is free: its other finish time."""

    def load_s(self, request: RequestView, slot: SlotView) -> float:
        """Seconds to load there what of the request's models is missing there."""

    def run_s(self, request: RequestView, slot: SlotView) -> float: ...

    def slowdown(self, request: RequestView, slot: SlotView) -> float:
        """How many times as long as alone the request should run beside what runs there now.

        It is a part of `run_s`. 1 for a GPU that runs one lease at a time, and where nothing is
        known of the models or of what they do to each other.
        """

    def disturbs(self, request: RequestView, slot: SlotView) -> float:
        """Seconds by which the request should prolong the runs there, all of them together."""

    def slows(self, request: RequestView, slot: SlotView) -> float:
        """How many times as long the run there should take that the request slows down most."""

    def room(self, slot: SlotView) -> GpuRoom: ...

    def configured_s(
        self, request: RequestView, slot: SlotView, configuration: Configuration
    ) -> float: ...

    def measured(self, request: RequestView, slot: SlotView) -> Sequence[Configuration]:
        """The configurations in which such requests were measured on GPUs of the slot's type."""

    # -- the global queue -----------------------------------------------------------------------

    def head(self, slot: SlotView | None = None) -> RequestView | None:
        """The first waiting request: of all that some GPU could hold, or that has room here."""

    def first_hit(self, slot: SlotView) -> RequestView | None: ...

    def waiting_like(self, request: RequestView, most: int) -> Sequence[RequestView]: ...

    def oldest(self, most: int) -> Sequence[RequestView]:
        """The first request of each set of models, the oldest first."""

    def last_like(self, request: RequestView) -> RequestView: ...

    def waiting(self, request: RequestView) -> int:
        """How many requests wait for the same models."""

    def visits_reached(self, request: RequestView, limit: int) -> bool: ...

    # -- what is lacking (these cost nothing until a policy asks for the first time) --------------

    def hits(self) -> Iterator[tuple[RequestView, SlotView]]:
        """Waiting requests that an idle slot could serve with no load, least used slot first.

        A policy that asks for them must place each one, or end its run.
        """

    def unheld(self, most: int) -> Sequence[RequestView]:
        """Of each set of models that no GPU holds but one could, the first request, by age."""

    def most_in_excess(self, most: int) -> Sequence[RequestView]:
        """Of each held set of models, the first request; most work a holder, less a load, first."""

    def copies(self, request: RequestView) -> int: ...

    def near_idle(self, request: RequestView) -> Sequence[SlotView]:
        """The idle slots with room on the node that the request is best near, least used first.

        None where it names no node. A node has its data, or its function.
        """

    def home_idle(self, request: RequestView) -> Sequence[SlotView]:
        """The idle slots with room on the request's home, least used first.

        That is the node that it names, or one that its application, stage and models lead to,
        always the same while nodes stay.
        """

    def idle_holders(self, request: RequestView, most: int) -> Sequence[SlotView]:
        """Idle slots that hold all the request's models, of at most so many GPUs."""

    def idle_keepers(self, request: RequestView) -> Sequence[SlotView]:
        """The idle slots with room whose GPUs keep a process that one of the request's models left.

        Least used first; none where no model leaves its process behind (staged exit).
        """

    def few_idle(self, request: RequestView, most: int) -> Sequence[SlotView]:
        """The least used idle slots where the request's models have room, after evictions."""

    def any_idle(self) -> bool: ...

    def few_loadable(self, request: RequestView, most: int) -> Sequence[SlotView]:
        """The least used slots, idle or not, that could load the request's models beside runs.

        Their GPUs load nothing now, and have room for the models after evictions.
        """

    def any_loadable(self) -> bool: ...

    def strands(self, slot: SlotView, models: Sequence[ModelId]) -> bool:
        """Whether requests wait for this GPU alone that lack a model there if these leave."""

    def slot_count(self) -> int:
        """How many slots take requests, idle or not."""

    def idle_share(self) -> float:
        """The share of the other slots that are idle, from 0 to 1, beside one idle slot."""

    def victims(self, request: RequestView, slot: SlotView) -> Sequence[ModelId]:
        """What would be evicted for the request there; it must have room."""

    def nearest_load_s(self, request: RequestView) -> float:
        """Seconds to load all the request's models where they are in host memory."""

    def facts(self, model: ModelId) -> ModelFacts: ...

    def rival_work_s(self, slot: SlotView, request: RequestView) -> float:
        """The slot's share of the work that waits for the other models on its GPU, in seconds."""

    def overtaken(self, head: RequestView) -> int:
        """How many later requests have left the queue while this one, the first, waited."""

    # -- local queues ---------------------------------------------------------------------------

    def local_head(self, slot: SlotView) -> RequestView | None:
        """The first request of the slot's local queue, if it could begin now."""

    def local_hit(self, slot: SlotView, within: int = 0) -> RequestView | None:
        """The first request of the slot's local queue whose models are all there.

        If `within` is not 0, only so many requests of the queue are looked at, the first ones.
        """


class Policy(Protocol):
    """Which request goes where; its fields are its parameters, the core keeps its state."""

    def decide(self, view: View) -> Iterator[Decision]:
        """Decisions in order; each is carried out before the next one is requested."""


class WeighedSlot(NamedTuple):
    """A slot that a policy weighed for a request: by name, the seconds that each term gains."""

    slot: SlotId
    terms: dict[str, float]


class WeighingPolicy(Protocol):
    """What a policy may have beside `Policy`."""

    def weighed(self, view: View, request: RequestView) -> Sequence[WeighedSlot]:
        """The slots that it weighs for this request, with the terms, as things stand.

        It is asked only for requests whose placement is explained, just before that.
        """


def check_bounds(policy: str, chosen: Any, *from_one: str) -> None:
    """Raise BadParameter if a parameter of the policy is below 0, or one of these below 1."""
    for field in fields(chosen):
        if getattr(chosen, field.name) < 0:
            raise BadParameter(policy, field.name, "must be 0 or more")
    for name in from_one:
        if getattr(chosen, name) < 1:
            raise BadParameter(policy, name, "must be 1 or more")
