"""Installs the shim in a process that has just imported torch."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch_shim.cuda_api import (
    autocast,
    collectives,
    cuda_module,
    own_kernels,
    parallel,
    randomness,
)
from torch_shim.foreign_tensors import wrappers
from torch_shim.layers import fast_paths
from torch_shim.passing import serialization, sharing
from torch_shim.settings import ShimSettings
from torch_shim.tensors import (
    advertised_memory,
    factories,
    gradients,
    modules,
    moves,
    nested,
    scripting,
    special_operators,
    transforms,
)

Hook: TypeAlias = Callable[[ShimSettings], None]

_lock = threading.Lock()
_installed: list[ShimSettings] = []


def install(settings: ShimSettings, hooks: Sequence[Hook] = ()) -> None:
    """Patch PyTorch, once per process, and then call the hooks in order."""
    with _lock:
        if _installed:
            return
        advertised_memory.install(settings.gpu_memory_bytes)
        special_operators.install()
        randomness.install()
        moves.install()
        factories.install()
        modules.install()
        serialization.install()
        sharing.install()
        gradients.install()
        transforms.install()
        scripting.install()
        fast_paths.install()
        parallel.install()
        collectives.install()
        own_kernels.install()
        wrappers.install()
        nested.install()
        autocast.install()
        cuda_module.install(settings)
        for hook in hooks:
            hook(settings)
        _installed.append(settings)
