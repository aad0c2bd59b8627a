"""What the GPU manager needs to know of a GPU; everything above is the same for all kinds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cache_manager.model.ids import GpuId


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """Something that a GPU said about itself; after a fatal one nothing that it computes counts."""

    gpu: GpuId
    what: str
    fatal: bool


class GpuDevice(Protocol):
    """One GPU, or one slice of it with memory of its own."""

    @property
    def id(self) -> GpuId:
        """Its name in the cluster."""
        ...

    @property
    def kind(self) -> str:
        """`cuda` or `cpu`."""
        ...

    @property
    def name(self) -> str:
        """What its maker calls it."""
        ...

    @property
    def gpu_type(self) -> str:
        """The same for all GPUs that are equally fast."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What models may use in all."""
        ...

    @property
    def device_bytes(self) -> int:
        """What it has; `memory_bytes` may be less by choice."""
        ...

    @property
    def worker_device(self) -> str:
        """A worker's name for it: `cpu`, or `cuda:` and the UUID of the one GPU it may see."""
        ...

    def used_bytes(self) -> int | None:
        """What all processes use of `device_bytes` now; None where that is unknown."""
        ...

    def process_bytes(self) -> Mapping[int, int]:
        """What each process uses of it, by process id; empty where that is unknown."""
        ...

    def utilisation(self) -> float | None:
        """The share of the last moments in which it computed; None where that is unknown."""
        ...

    def health(self) -> tuple[HealthEvent, ...]:
        """What it said since this was last asked."""
        ...

    def close(self) -> None:
        """Watch it no more."""
        ...
