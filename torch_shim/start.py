"""The entry point that the import hook calls after torch's import: reads the settings, installs."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch_shim.capture import module_calls
from torch_shim.cuda_api import autocast, cuda_module, own_kernels, parallel, randomness
from torch_shim.settings import ShimSettings
from torch_shim.tensors import (
    advertised_memory,
    attention_layers,
    factories,
    foreign_classes,
    gradients,
    moves,
    scripting,
    serialization,
    special_operators,
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
        moves.install_modules()
        serialization.install()
        serialization.install_sharing()
        gradients.install()
        gradients.install_transforms()
        scripting.install()
        attention_layers.install()
        parallel.install()
        parallel.install_collectives()
        own_kernels.install()
        foreign_classes.install()
        factories.install_nested()
        autocast.install()
        cuda_module.install(settings)
        for hook in hooks:
            hook(settings)
        _installed.append(settings)


# The steps that run, in this order, after the handles are installed.
HOOKS: list[Hook] = [module_calls.install]


def after_import() -> None:
    settings = ShimSettings.from_environment(os.environ)  # noqa: TID251 - the process's entry point
    install(settings, HOOKS)
