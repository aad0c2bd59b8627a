"""Random numbers on the GPU, and generators for it.

They are drawn from the CPU's stream in program order, so that a program gets the same numbers as on
the CPU.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from torch_shim.patching import CPU, CUDA, DeviceLike, names_cuda, of_device, set_attribute

_NativeGenerator = torch._C.Generator  # noqa: SLF001 - torch.Generator before its replacement


class _GeneratorType(type(_NativeGenerator)):  # type: ignore[misc] # PyTorch has a metaclass for it
    """Makes isinstance() true for generators that PyTorch itself created."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _NativeGenerator)


class Generator(_NativeGenerator, metaclass=_GeneratorType):
    """A random number generator on the CPU, or nominally on the GPU."""

    def __new__(cls, device: DeviceLike = "cpu") -> "Generator":
        on_gpu = names_cuda(device)
        made: Generator = _NativeGenerator.__new__(cls, CPU if on_gpu else device)  # type: ignore[call-arg] # C
        made.on_gpu = on_gpu
        return made

    on_gpu: bool

    @property
    def device(self) -> torch.device:  # type: ignore[override] # a descriptor of C there
        return CUDA if self.on_gpu else _NativeGenerator.device.__get__(self)

    def clone_state(self) -> "Generator":
        made = type(self)(self.device)
        made.set_state(self.get_state())
        return made


_stream = torch.default_generator


def install() -> None:
    set_attribute(torch, "Generator", Generator)


def _manual_seed(seed: int) -> None:
    _stream.manual_seed(seed)


def _seed() -> None:
    _stream.seed()


def _initial_seed() -> int:
    return _stream.initial_seed()


def _set_rng_state(new_state: torch.Tensor, device: DeviceLike = "cuda") -> None:
    names_cuda(device)
    _stream.set_state(new_state)


def _get_rng_state_all() -> list[torch.Tensor]:
    return [_stream.get_state()]


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        _stream.set_state(state)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "manual_seed": _manual_seed,
    "manual_seed_all": partial(_manual_seed),
    "seed": _seed,
    "seed_all": partial(_seed),
    "initial_seed": _initial_seed,
    "get_rng_state": of_device("get_rng_state", _stream.get_state),
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": _get_rng_state_all,
    "set_rng_state_all": _set_rng_state_all,
}
