"""Requests as the core holds them, and the sets of models that they need."""

from enum import Enum, auto

from cache_manager.model.ids import ModelId
from scheduler.model.values import LeaseId, Request, RequestId, SlotId


class Standing(Enum):
    """Where an accepted request is; HELD: policies do not see it until it is its turn."""

    HELD = auto()
    WAITING = auto()
    LOCAL = auto()
    LEASED = auto()
    PAUSED = auto()


class Bundle:
    """The models that one request needs together; interned, so that it is compared by identity.

    `needs` holds each model's memory; `size_class` is the smallest GPU size that has room.
    """

    __slots__ = ("bytes", "models", "needs", "size_class")

    def __init__(self, models: tuple[ModelId, ...]) -> None:
        self.models = models
        self.needs: tuple[tuple[ModelId, int], ...] = ()
        self.bytes = 0
        self.size_class = 0


class Pending:
    """One request that the core has accepted and not finished yet.

    `seq` is its place in the order of arrival, `number` how many requests were accepted before it
    and not paused then, `rank` its place in its present queue; `wait_s` is what it adds to the
    wait of a local queue; `gave_back` are the leases that it gave back early before it asked for
    another one.
    """

    __slots__ = (
        "arrived_s",
        "at",
        "bundle",
        "following",
        "gave_back",
        "leading",
        "lease",
        "number",
        "rank",
        "request",
        "seq",
        "standing",
        "wait_s",
    )

    def __init__(self, request: Request, bundle: Bundle, seq: int, arrived_s: float) -> None:
        self.request = request
        self.bundle = bundle
        self.seq = seq
        self.arrived_s = arrived_s
        self.rank = seq
        self.number = 0
        self.leading: Pending | None = None
        self.following: Pending | None = None
        self.standing = Standing.WAITING
        self.at: SlotId | None = None
        self.lease: LeaseId | None = None
        self.gave_back: list[LeaseId] = []
        self.wait_s = 0.0

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def function(self) -> str:
        return self.request.function

    @property
    def application(self) -> str:
        return self.request.application

    @property
    def stage(self) -> str:
        return self.request.stage

    @property
    def slo_s(self) -> float | None:
        return self.request.slo_s

    @property
    def models(self) -> tuple[ModelId, ...]:
        return self.bundle.models


def of_one_function(chosen: list[Pending]) -> tuple[Pending, ...]:
    """Those of the first one's function: sessions of one function alone can share a lease."""
    if len(chosen) == 1:
        return (chosen[0],)
    function = chosen[0].request.function
    return tuple([each for each in chosen if each.request.function == function])
