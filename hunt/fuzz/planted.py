"""Operators with faults that the fuzz has to find, and one without."""

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

FAULTY = {
    "t:planted.reads_beyond": "SIGSEGV",
    "t:planted.writes_beyond": "SIG",
    "t:planted.writes_before": "SIG",
    "t:planted.gives_unwritten": "memory held before",
    "t:planted.divides_by_nothing": "SIGFPE",
    "t:planted.uses_freed": "SIGSEGV",
    "t:planted.raises_otherwise": "raises",
}
SOUND = "t:planted.adds"


class PlantedTable:
    """As `OperatorTable`, with these."""

    def names(self) -> list[str]:
        """Their names."""
        return [*FAULTY, SOUND]

    def find(self, name: str) -> Callable[..., Any]:
        """One of them."""
        found: Callable[..., Any] = globals()[f"_{name.rpartition('.')[2]}"]
        return found


def _memory(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.uint8)


def _reads_beyond(*_: object, **__: object) -> torch.Tensor:
    memory = _memory(100)
    ctypes.string_at(memory.data_ptr() - 4096, 1)
    ctypes.string_at(memory.data_ptr() + 4096, 1)
    return memory


def _writes_beyond(*_: object, **__: object) -> torch.Tensor:
    memory = _memory(101)
    ctypes.memset(memory.data_ptr() + 101, 0, 1)
    return memory


def _writes_before(*_: object, **__: object) -> torch.Tensor:
    memory = _memory(100)
    ctypes.memset(memory.data_ptr() - 1, 0, 1)
    return memory


def _gives_unwritten(*_: object, **__: object) -> torch.Tensor:
    return torch.empty(10)


def _divides_by_nothing(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGFPE)


def _uses_freed(*_: object, **__: object) -> bytes:
    address = _memory(100).data_ptr()
    return ctypes.string_at(address, 1)


def _raises_otherwise(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def _adds(*_: object, **__: object) -> torch.Tensor:
    return torch.ones(3) + 1
