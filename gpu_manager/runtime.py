"""The port through which a node hosts models: load, admit calls, unload; and what it reports."""

import socket
from asyncio import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Emulation:
    """Times that an emulated GPU takes at least; 0 is as fast as it goes."""

    load_s: float = 0.0
    run_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One model for one GPU. `image` is a descriptor of the sealed image that the caller keeps.

    `device` is torch's name for the GPU (`cuda:0`, or `cpu` for an emulated one); `limit_bytes` is
    what the model may use there in all: weights, activations and the process's own overhead.
    `turns` is a descriptor of the GPU's turns (`worker/turns.py`), kept by the caller too, where
    several leases may be in force there at once: one call at a time runs on the GPU.
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


class Relief(NamedTuple):
    """The answer to pressure: the limit from now on, and whether to try the call again."""

    limit_bytes: int
    retry: bool


class Hosted(Protocol):
    """A model on a GPU, until `closed` is done."""

    @property
    def order(self) -> LoadOrder:
        """What was asked for."""

    @property
    def worker_id(self) -> str:
        """The name under which shims know the worker; never used twice."""

    @property
    def pid(self) -> int:
        """The process that runs the model, for the log and for what the driver says of it."""

    @property
    def memory_bytes(self) -> int:
        """GPU memory it takes, as last measured: weights, overhead and the peak of its calls."""

    @property
    def load_s(self) -> float:
        """What loading took, from the order to the last byte in place."""

    @property
    def closed(self) -> "Future[str]":
        """Done when the model is gone, with the cause in words."""

    def admit(self, lease: int) -> None:
        """Let calls under this lease run."""

    async def end(self, lease: int, grace_s: float = 2.0) -> None:
        """Admit no further call of the lease and return when none is in flight.

        A call that outlives the grace is ended with the worker, which `died` then reports.
        """

    def channel(self, session: str, function: str, end: socket.socket) -> None:
        """Serve a shim's calls on this socket, which is the runtime's from now on."""

    def limit(self, limit_bytes: int) -> None:
        """Change what the model may use; a smaller limit counts from the next call on."""

    async def unload(self) -> int:
        """Take the model off the GPU, whatever it does; the bytes that this gave back."""


class Observer(Protocol):
    """Who wants to know what hosted models do; called on the event loop."""

    def ran(
        self,
        hosted: Hosted,
        lease: int,
        batch: int,
        run_s: float,
        peak_bytes: int,
        calls: int = 1,
    ) -> None:
        """Calls ended well. Peak: all the memory the model took at its highest so far.

        `batch` is the first dimension of the call's largest input, 0 where it has none; `run_s` is
        what each call took.
        """

    async def pressure(self, hosted: Hosted, lease: int, need_bytes: int) -> Relief:
        """A call needs that many bytes in all, more than the limit; it waits for the answer."""
        ...

    def died(self, hosted: Hosted, cause: str) -> None:
        """The worker ended though nobody had asked for it."""


class Runtime(Protocol):
    """Hosts models."""

    async def load(self, order: LoadOrder) -> Hosted:
        """Bring a model onto its GPU, or raise LoadFailure."""
        ...

    async def close(self) -> None:
        """Unload everything and leave no process behind."""
