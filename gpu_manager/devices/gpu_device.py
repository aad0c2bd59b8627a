"""The GPU manager's interface to a GPU, the same for all kinds of GPUs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from cache_manager.model.ids import GpuId


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """A health event of a GPU; after a fatal one the GPU's results cannot be trusted."""

    gpu: GpuId
    what: str
    fatal: bool


class GpuDevice(Protocol):
    """One GPU, or one slice of a GPU with its own memory."""

    @property
    def id(self) -> GpuId:
        """The GPU's name in the cluster."""

    @property
    def kind(self) -> str:
        """`cuda` or `cpu`."""

    @property
    def name(self) -> str: ...

    @property
    def gpu_type(self) -> str:
        """A name that GPUs of the same speed share."""

    @property
    def memory_bytes(self) -> int:
        """The memory that models may use in total."""

    @property
    def device_bytes(self) -> int:
        """The GPU's memory; `memory_bytes` may be configured to be less."""

    @property
    def worker_device(self) -> str:
        """The name for workers: `cpu`, or `cuda:` and the UUID of the only GPU they may see."""

    @property
    def is_divisible(self) -> bool:
        """Whether its compute can be announced as several slots: it is no part of a GPU itself."""

    def used_bytes(self) -> int | None:
        """Return the bytes of `device_bytes` that all processes use now; None if unknown."""

    def process_bytes(self, pids: Collection[int] = ()) -> Mapping[int, int]:
        """Return the bytes that each process uses, by process id, as far as they are known.

        An emulated GPU knows only of `pids`, and without weights and contexts, which are elsewhere.
        """

    def utilisation(self) -> float | None:
        """Return the share of the last moments in which the GPU computed; None if unknown."""

    def memory_utilisation(self) -> float | None:
        """Return the share of the last moments in which its memory was used; None if unknown."""

    def health(self) -> tuple[HealthEvent, ...]:
        """Return the health events since the last call."""

    def close(self) -> None: ...
