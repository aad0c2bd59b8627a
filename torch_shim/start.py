"""The entry point that the import hook calls after torch's import: reads the settings, installs."""

import os
import threading

from torch_shim.capture import module_calls
from torch_shim.cuda_api import cuda_module, parallel, randomness
from torch_shim.data import put_and_get
from torch_shim.remote import operators_there, recorded_calls
from torch_shim.settings import ShimSettings
from torch_shim.tensors import (
    advertised_memory,
    attention_layers,
    factories,
    foreign_classes,
    gradients,
    moves,
    serialization,
    special_operators,
)

_lock = threading.Lock()
_installed: list[ShimSettings] = []


def after_import() -> None:
    """Patch PyTorch, once per process."""
    settings = ShimSettings.from_environment(os.environ)  # noqa: TID251 - the process's entry point
    with _lock:
        if _installed:
            return
        advertised_memory.install(settings.gpu_memory_bytes)
        special_operators.install()
        randomness.install()
        moves.install()
        factories.install()
        serialization.install()
        gradients.install()
        attention_layers.install()
        parallel.install()
        foreign_classes.install()
        cuda_module.install(settings)
        nodes = module_calls.install(settings)
        put_and_get.connect(nodes)
        operators_there.install()
        recorded_calls.install()
        _installed.append(settings)
