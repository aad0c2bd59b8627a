"""The port through which a node hosts models: load, admit calls, unload, and reports of them.

A runtime decides how many models share a process. What is above it knows a hosted model by an
opaque id and learns of processes only where a runtime describes them (`HostProcess`).
"""

import socket
from asyncio import Future
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

HostedId = NewType("HostedId", str)


@dataclass(frozen=True, slots=True)
class Emulation:
    """The least times of an emulated GPU; 0 adds nothing."""

    load_s: float = 0.0
    run_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One model for one GPU. `image` is a descriptor of the sealed image that the caller keeps.

    `device` is torch's name for the GPU (`cuda:0`, or `cpu` for an emulated one); `limit_bytes` is
    the most that the model may use there: weights, activations and its share of what the runtime
    itself takes. `turns` is a descriptor of the lock by which runtimes run one call at a time on
    the GPU (`worker/device/gpu_turns.py`); it is given where several leases may be in force there,
    and kept by the caller.
    """

    model: str
    tenant: str
    gpu: str
    device: str
    digest: str
    table: tuple[tuple[int, int], ...]
    total_bytes: int
    image: int
    limit_bytes: int
    emulation: Emulation = Emulation()
    turns: int | None = None


class PressureAnswer(NamedTuple):
    """The answer to memory pressure: the new limit, and whether to try the call again."""

    limit_bytes: int
    retry: bool


@dataclass(frozen=True, slots=True)
class HostProcess:
    """The process that runs a model; models of one tenant may share it."""

    pid: int


class HostedModel(Protocol):
    """A model on a GPU, until `closed` is done."""

    @property
    def order(self) -> LoadOrder:
        """The order that it was loaded by."""

    @property
    def id(self) -> HostedId:
        """The name by which shims ask for channels to it; never used for another hosted model."""

    @property
    def host(self) -> HostProcess | None:
        """The process that runs it, where the runtime can name one: for logs and the driver."""

    @property
    def memory_bytes(self) -> int:
        """GPU memory it takes, as last measured: weights, overhead and the peak of its calls."""

    @property
    def load_s(self) -> float:
        """Seconds that loading took, from the order to the last byte in place."""

    @property
    def closed(self) -> "Future[str]":
        """Done when the model is gone; the result is the cause in words."""

    def admit(self, lease: int) -> None:
        """Let calls under this lease run."""

    async def end(self, lease: int, grace_s: float = 2.0) -> None:
        """Admit no further call of the lease and return when none is in flight.

        A call that outlives the grace is ended by force; `died` is then called for every model
        that is lost with it.
        """

    def channel(self, session: str, function: str, end: socket.socket) -> None:
        """Serve a shim's calls on this socket, which the runtime owns from now on."""

    def limit(self, limit_bytes: int) -> None:
        """Change how much the model may use; a smaller limit counts from the next call on."""

    async def unload(self) -> int:
        """Take the model off the GPU, also in the midst of a call; the bytes that this freed."""


class Observer(Protocol):
    """Receives what hosted models report; called on the event loop."""

    def ran(
        self,
        hosted: HostedModel,
        lease: int,
        batch: int,
        run_s: float,
        peak_bytes: int,
        calls: int = 1,
    ) -> None:
        """Calls ended well. Peak: all the memory the model took at its highest so far.

        `batch` is the first dimension of the call's largest input, 0 where it has none; `run_s` is
        the time of each call.
        """

    async def pressure(self, hosted: HostedModel, lease: int, need_bytes: int) -> PressureAnswer:
        """A call needs that many bytes in all, more than the limit; it waits for the answer."""
        ...

    def died(self, hosted: HostedModel, cause: str) -> None:
        """The model is gone though no `unload` was called; once for each model of a process."""


class Runtime(Protocol):
    """Hosts models."""

    async def load(self, order: LoadOrder) -> HostedModel:
        """Bring a model onto its GPU, or raise LoadFailure."""
        ...

    async def close(self) -> None:
        """Unload everything and leave no process behind."""
