"""What is measured of calls: kinds of call, the systems that answer them, and the goals."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.measure.peers.peer_installs import PeerSystem

ONE, MANY, MOST = CLIENTS = (1, 32, 256)


class CallKind(StrEnum):
    """A kind of call."""

    PLAIN = "plain call"
    EMPTY = "GPU call that does nothing"
    COMPUTING = "GPU call that computes"
    COMPETING = "GPU calls that compute, of functions that compete"


class Answering(StrEnum):
    """A system that answers calls."""

    GPUFAAS = "gpufaas"
    TUNED = "gpufaas, tuned"
    LITSERVE = "LitServe"
    RAY = "Ray Serve"
    BENTOML = "BentoML"
    MOSEC = "mosec"
    TRITON = "Triton"


OURS = frozenset({Answering.GPUFAAS, Answering.TUNED})
PEERS = {
    Answering.LITSERVE: PeerSystem.LITSERVE,
    Answering.RAY: PeerSystem.RAY,
    Answering.BENTOML: PeerSystem.BENTOML,
    Answering.MOSEC: PeerSystem.MOSEC,
    Answering.TRITON: PeerSystem.TRITON,
}
# A peer's call that does nothing has no GPU: it stands beside both of ours that do nothing.
_OF_PEERS = (CallKind.EMPTY, CallKind.COMPUTING)
# What leases on one GPU and instances of one function change.
_OF_TUNED = (CallKind.COMPUTING, CallKind.COMPETING)
_CLIENTS = {CallKind.COMPETING: (MANY,)}
GPUS = {
    CallKind.PLAIN: 8,
    CallKind.EMPTY: 8,
    CallKind.COMPUTING: 2,
    CallKind.COMPETING: 4,
}
COMPETING_FUNCTIONS = 4


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """What can be set of ours for calls that compute: leases on a GPU, a function's instances."""

    gpu_overlap: int = 1
    instances: int = 1


AS_IT_COMES = OwnSettings()


@dataclass(frozen=True, slots=True)
class CallCase:
    """One kind of call, answered by one system."""

    kind: CallKind
    system: Answering

    @property
    def clients(self) -> tuple[int, ...]:
        """The numbers of clients that it is measured with."""
        return _CLIENTS.get(self.kind, CLIENTS)

    def __str__(self) -> str:
        return f"{self.system}, {self.kind}"


def cases(systems: list[Answering], kinds: list[CallKind]) -> list[CallCase]:
    """The cases of these systems and kinds, by kind: so systems take turns within a round."""
    return [
        CallCase(kind, system)
        for kind in CallKind
        for system in Answering
        if kind in kinds and system in systems
        if kind in _kinds_of(system)
    ]


def _kinds_of(system: Answering) -> Sequence[CallKind]:
    if system is Answering.GPUFAAS:
        return tuple(CallKind)
    return _OF_TUNED if system is Answering.TUNED else _OF_PEERS


class Figure(StrEnum):
    """A figure that a goal is about."""

    RATE = "calls/s, at least"
    MEDIAN = "median ms, at most"
    CPU = "CPU ms a call of all parts, at most"
    SCHEDULER = "CPU ms a call of the scheduler, at most"


@dataclass(frozen=True, slots=True)
class CallGoal:
    """What gpufaas is to reach at one kind of call; times are in seconds."""

    kind: CallKind
    clients: int
    figure: Figure
    value: float

    def reached(self, value: float) -> bool:
        """Whether a figure is as good as the goal."""
        return value >= self.value if self.figure is Figure.RATE else value <= self.value

    def show(self, value: float) -> str:
        """A figure of this kind, in the unit of its name."""
        return f"{value:,.0f}" if self.figure is Figure.RATE else f"{1e3 * value:.2f}"


GOALS = (
    CallGoal(CallKind.PLAIN, ONE, Figure.RATE, 2_200),
    CallGoal(CallKind.PLAIN, MANY, Figure.RATE, 6_000),
    CallGoal(CallKind.PLAIN, MOST, Figure.RATE, 5_500),
    CallGoal(CallKind.EMPTY, ONE, Figure.RATE, 1_300),
    CallGoal(CallKind.EMPTY, ONE, Figure.MEDIAN, 0.0007),
    CallGoal(CallKind.EMPTY, MANY, Figure.RATE, 3_200),
    CallGoal(CallKind.EMPTY, MOST, Figure.RATE, 3_000),
    CallGoal(CallKind.COMPUTING, ONE, Figure.MEDIAN, 0.0012),
    CallGoal(CallKind.COMPUTING, MANY, Figure.RATE, 1_500),
    CallGoal(CallKind.COMPUTING, MANY, Figure.CPU, 0.0013),
    CallGoal(CallKind.COMPETING, MANY, Figure.RATE, 1_800),
    CallGoal(CallKind.COMPETING, MANY, Figure.SCHEDULER, 0.0001),
)
