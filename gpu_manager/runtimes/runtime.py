"""The interface by which a node hosts models: load, admit calls, unload, and reports.

A runtime decides how many models share a process. The layers above identify a hosted model by an
opaque id, and see processes only as far as a runtime describes them (`HostProcess`).
"""

import socket
from asyncio import Future
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, NewType, Protocol

from gpu_manager.devices.loads import LoadProgress, LoadUrgency
from gpu_manager.devices.paths import GpuPaths
from gpu_manager.weights.image_requests import ImageFeed
from gpu_manager.worker.orders import Admission, CallsRan, WorkerOrder

HostedId = NewType("HostedId", str)


@dataclass(frozen=True, slots=True)
class Emulation:
    """The least times of an emulated GPU; 0 means no minimum."""

    load_s: float = 0.0
    run_s: float = 0.0


class LoadSpan(NamedTuple):
    """A part of a load, and when it began and ended, by the event loop's clock.

    Spans of a load may overlap.
    """

    phase: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One model to be loaded on one GPU. The caller keeps both descriptors."""

    model: str
    tenant: str
    gpu: str
    device: str  # torch's name for the GPU: `cuda:0`, or `cpu` for an emulated one
    digest: str
    table: tuple[tuple[int, int], ...]
    total_bytes: int
    image: int  # a descriptor of the image in shared memory
    # Memory on the GPU: weights, activations, and the process's own memory unless the model shares
    # the process with others, by the runtime of streams.
    limit_bytes: int
    emulation: Emulation = Emulation()
    # A descriptor of the lock by which runtimes run one call at a time on the GPU, or on each of
    # its `slots` (`devices/gpu_turns.py`). None: calls of several processes run at the same time.
    turns: int | None = None
    slots: int = 1
    # The process that takes the model, left there by another model of the tenant. None, or if it
    # has ended: a process that was prepared takes it.
    emptied: "EmptyHost | None" = None
    # The image is still being read, and the load ends only after its content was verified. None: it
    # is sealed.
    arrival: ImageFeed | None = None
    runtime: str = "process"
    gpu_share: float = 1.0  # of the GPU's multiprocessors: its calls use no more, or the load fails
    merged: int = 0  # this many calls at most run as one; 0: as many as measurements say
    together_bytes: int = 0  # all models of a shared process may use this much at once
    paths: GpuPaths = field(default_factory=GpuPaths)  # between process and GPU
    urgency: LoadUrgency = field(default_factory=LoadUrgency)  # whether a request waits
    progress: LoadProgress = field(default_factory=LoadProgress)  # told of waits without a worker


class PressureAnswer(NamedTuple):
    """The answer to memory pressure: the new limits, and whether to retry the call."""

    limit_bytes: int
    retry: bool
    together_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostProcess:
    """The process that runs a model; models of one tenant may share it."""

    pid: int


class EmptyHost:
    """A process that a model has left, with its context on the GPU, until `closed` is done.

    It ends, or takes one more model of the same tenant.
    """

    host: HostProcess | None  # if the runtime can name it
    memory_bytes: int  # on the GPU, that the process was left with
    closed: "Future[str]"  # done when it has ended or has taken a model; the result says which

    async def end(self) -> None:
        """End the process, and return when its memory is free; nothing if it has taken a model."""
        raise NotImplementedError


class HostedModel:
    """A model on a GPU, until `closed` is done."""

    order: LoadOrder  # by which it was loaded
    id: HostedId  # by which shims ask for channels to the model; it is never reused
    number: int  # that the model has in orders to its worker
    host: HostProcess | None  # its process, if the runtime can name one: for logs and the driver
    memory_bytes: int  # on the GPU, as last measured: weights, overhead and the peak of its calls
    overhead_bytes: int  # of the model's process on the GPU, before any model; 0 if unknown
    load_s: float  # that loading took, from the order to the last byte in place
    load_spans: Sequence[LoadSpan]  # the parts of the load that the runtime has measured
    closed: "Future[str]"  # done when the model has ended; the result is the cause as text

    def admit(self, admission: Admission) -> None:
        """Admit calls under a lease on the channels of its owner, and on no others."""

    async def end(self, lease: int, grace_s: float = 2.0) -> None:
        """Admit no further call of the lease and return when none is in flight.

        A call that outlives the grace is ended by force; `died` is then called for every model
        that is lost with it.
        """

    def ask_computed(self, lease: int) -> None:
        """Have the model's process say, by `computed`, for how long calls ran under this lease."""

    def channel(self, session: str, function: str, end: socket.socket) -> None:
        """Serve a shim's calls on this socket, and take ownership of the socket."""

    def limit(self, limit_bytes: int, together_bytes: int = 0) -> None:
        """Change the memory that the model may use; a smaller limit applies from the next call.

        All models of its process may use `together_bytes` at once; 0 if it has none beside it.
        """

    def send(
        self, order: WorkerOrder, descriptors: Sequence[int] = (), *, while_leaving: bool = False
    ) -> None:
        """Send the model's worker a feature's order about it; the caller keeps the descriptors.

        A worker that has ended gets none, and no model that leaves, unless the order says so.
        """

    async def heard(self) -> None:
        """Return when every report was handled that the worker has made so far, or it has ended."""

    async def unload(self) -> int:
        """Remove the model from the GPU, even during a call; return the bytes freed."""
        raise NotImplementedError

    async def empty(self) -> EmptyHost | None:
        """Remove the model from the GPU, and keep its process and context; None if none stays.

        The model has left in any case. A process that is slow to let it go is ended.
        """
        raise NotImplementedError


class NodeFeature:
    """What a node does with models beside hosting them. Here no hook does anything."""

    async def rescue(self, hosted: HostedModel) -> None:
        """Bring what only this model's worker has to safety: the model is about to leave."""

    def reported(
        self, hosted: HostedModel, report: WorkerOrder, descriptors: Sequence[int]
    ) -> None:
        """Handle a worker's report about the feature; the caller closes the descriptors."""

    def look(self) -> None:
        """Look for what is amiss; called every few seconds."""


class MergedSums(NamedTuple):
    """Calls that waited together: how many groups ran as one, and the calls in these; how many
    ran both ways to be compared; how many ran singly, by the reason. `never` has the digests of
    programs that must not be merged again, with the reasons."""

    groups: int = 0
    calls: int = 0
    compared: int = 0
    singly: Mapping[str, int] = MappingProxyType({})
    never: Mapping[str, str] = MappingProxyType({})

    def plus(self, other: "MergedSums") -> "MergedSums":
        reasons = {**self.singly, **other.singly}
        singly = {why: self.singly.get(why, 0) + other.singly.get(why, 0) for why in reasons}
        return MergedSums(
            self.groups + other.groups,
            self.calls + other.calls,
            self.compared + other.compared,
            singly,
            {**self.never, **other.never},
        )


class Observer:
    """Receives the reports of hosted models, on the event loop; this base has no memory to give."""

    features: Sequence[NodeFeature] = ()  # receive the reports about what the core does not know

    def ran(self, hosted: HostedModel, report: CallsRan) -> None:
        """Handle a report of successful calls; its `peak_bytes` are the model's highest so far."""

    def computed(self, hosted: HostedModel, lease: int, computed_s: float) -> None:
        """Handle for how long calls ran under a lease in the model's process since it last said so.

        A call that still runs counts up to now; the report comes when a model is asked by
        `ask_computed`, and before the lease's end.
        """

    def claimed(self, hosted: HostedModel, lease: int, session: str) -> None:
        """Handle a session's first call under a lease that was admitted for its function."""

    async def pressure(self, hosted: HostedModel, lease: int, need_bytes: int) -> PressureAnswer:
        """Handle a call that needs `need_bytes` in total, beyond its limit; the call waits."""
        del lease, need_bytes
        return PressureAnswer(hosted.order.limit_bytes, retry=False)

    def merged(self, hosted: HostedModel, added: MergedSums) -> None:
        """Handle the report of calls that ran as one, and of those that did not."""

    def died(self, hosted: HostedModel, cause: str) -> None:
        """Handle a model's unexpected end; called once for each model of a process."""

    def context_lost(self, host: EmptyHost, cause: str) -> None:
        """Handle the unexpected end of a process that holds no model."""


class Runtime(Protocol):
    """Hosts models."""

    def prepare(self) -> None:
        """Get ready for a first load, in the background; called for every client that may need it.

        A load without it works too, and takes longer.
        """

    def hosting(self, wish: str, model: str) -> str:
        """Return the name of the runtime for this model, whose deployment may wish for one."""

    async def load(self, order: LoadOrder) -> HostedModel:
        """Load a model onto its GPU, or raise LoadFailure."""

    async def close(self) -> None:
        """Unload all models, and end all processes."""


# What a load waits for before it begins; the others take place side by side.
_WAITS = ("room", "weights")


class LoadPhases:
    """When each phase of a load began and ended."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._before_s = now_s()
        self._spans: list[LoadSpan] = []
        self._other_s = 0.0

    @property
    def spans(self) -> tuple[LoadSpan, ...]:
        return tuple(sorted(self._spans, key=lambda span: (span.begin_s, span.end_s)))

    def end(self, phase: str) -> None:
        before_s, self._before_s = self._before_s, self._now_s()
        self._spans.append(LoadSpan(phase, before_s, self._before_s))

    def add(self, spans: Iterable[LoadSpan]) -> None:
        """Add what others have measured since the last phase ended; what was before is cut off."""
        begin_s = self._before_s
        self._spans += [
            LoadSpan(phase, max(begin_s, first_s), last_s)
            for phase, first_s, last_s in spans
            if last_s > begin_s
        ]

    def finish(self) -> None:
        """The load is over: the time that no phase covers is the phase `other`."""
        beside = [span for span in self._spans if span.phase not in _WAITS]
        self._other_s = max(0.0, self._now_s() - self._before_s - _covered_s(beside))

    def took_s(self) -> dict[str, float]:
        found = {"other": self._other_s} if self._other_s else {}
        for span in self._spans:
            found[span.phase] = found.get(span.phase, 0.0) + span.end_s - span.begin_s
        return found

    def __str__(self) -> str:
        begin_s = min((span.begin_s for span in self._spans), default=0.0)
        return ", ".join(
            f"{phase} {first_s - begin_s:.3f}-{last_s - begin_s:.3f}"
            for phase, first_s, last_s in self.spans
        )


def hidden_s(spans: Sequence[LoadSpan]) -> float:
    """Return by how much a load of these phases would be longer if they took place in sequence.

    A transfer counts from the end of reading only: what it did before, it did between waits for
    what is read. So this is a lower bound.
    """
    read_s = max((span.end_s for span in spans if span.phase == "read"), default=float("-inf"))
    beside = [_without_waiting(span, read_s) for span in spans if span.phase not in _WAITS]
    whole_s = sum(span.end_s - span.begin_s for span in beside)
    return whole_s - _covered_s(beside)


def _without_waiting(span: LoadSpan, read_s: float) -> LoadSpan:
    if span.phase != "transfer" or read_s < span.begin_s:
        return span
    return span._replace(begin_s=min(read_s, span.end_s))


def _covered_s(spans: Iterable[LoadSpan]) -> float:
    covered_s, end_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda found: found.begin_s):
        covered_s += max(0.0, span.end_s - max(end_s, span.begin_s))
        end_s = max(end_s, span.end_s)
    return covered_s


class Preparation:
    """Prepares the runtime at the node's start, or for the first program that may use a GPU."""

    def __init__(self, *, at_start: bool) -> None:
        self._needed = at_start
        self._runtime: Runtime | None = None

    def start(self, runtime: Runtime) -> None:
        """Prepare this runtime, now or when it is needed."""
        self._runtime = runtime
        if self._needed:
            runtime.prepare()

    def need(self) -> None:
        """Prepare for a program that may use a GPU soon; without effect if that was done."""
        if self._needed:
            return
        self._needed = True
        if self._runtime is not None:
            self._runtime.prepare()
