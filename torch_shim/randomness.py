"""Random numbers of the GPU: a stream of its own beside the CPU's, and generators on the GPU."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torch_shim.devices import CPU, CUDA, DeviceLike, names_cuda
from torch_shim.patching import set_attribute

_NativeGenerator = torch._C.Generator  # noqa: SLF001 - torch.Generator before we replace it


class _GeneratorType(type(_NativeGenerator)):  # type: ignore[misc] # PyTorch has a metaclass for it
    """Makes isinstance() true for generators that PyTorch made itself."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _NativeGenerator)


class Generator(_NativeGenerator, metaclass=_GeneratorType):
    """A random number generator on the CPU or, in name, on the GPU."""

    def __new__(cls, device: DeviceLike = "cpu") -> "Generator":
        """A native generator; one for the GPU draws on the CPU."""
        on_gpu = names_cuda(device)
        made: Generator = _NativeGenerator.__new__(cls, CPU if on_gpu else device)  # type: ignore[call-arg] # C
        made.on_gpu = on_gpu
        return made

    on_gpu: bool

    @property
    def device(self) -> torch.device:  # type: ignore[override] # a descriptor of C there
        """Where it was asked to be."""
        return CUDA if self.on_gpu else _NativeGenerator.device.__get__(self)

    def clone_state(self) -> "Generator":
        """A generator with the same state."""
        made = type(self)(self.device)
        made.set_state(self.get_state())
        return made


# What every random operator on the GPU draws from unless it is given a generator.
default_generator = Generator("cuda")
_swapping = threading.RLock()


def install() -> None:
    """Replaces torch.Generator, and has torch.manual_seed seed the GPU too."""
    set_attribute(torch, "Generator", Generator)
    default_generator.manual_seed(torch.initial_seed())


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Has operators that take no generator draw from the GPU's stream."""
    cpu = torch.default_generator
    with _swapping:
        saved = cpu.get_state()
        cpu.set_state(default_generator.get_state())
        try:
            yield
        finally:
            default_generator.set_state(cpu.get_state())
            cpu.set_state(saved)


def draw_seed() -> int:
    """A number from the GPU's stream: the seed of a graph call that draws elsewhere."""
    return int(torch.randint(0, 2**62, (), generator=default_generator).item())


def _manual_seed(seed: int) -> None:
    default_generator.manual_seed(seed)


def _manual_seed_all(seed: int) -> None:
    default_generator.manual_seed(seed)


def _seed() -> None:
    default_generator.seed()


def _seed_all() -> None:
    default_generator.seed()


def _initial_seed() -> int:
    return default_generator.initial_seed()


def _get_rng_state(device: DeviceLike = "cuda") -> torch.Tensor:
    names_cuda(device)
    return default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: DeviceLike = "cuda") -> None:
    names_cuda(device)
    default_generator.set_state(new_state)


def _get_rng_state_all() -> list[torch.Tensor]:
    return [default_generator.get_state()]


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        default_generator.set_state(state)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed_all,
    "seed": _seed,
    "seed_all": _seed_all,
    "initial_seed": _initial_seed,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": _get_rng_state_all,
    "set_rng_state_all": _set_rng_state_all,
}
