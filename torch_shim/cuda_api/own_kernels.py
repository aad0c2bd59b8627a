"""Kernels that a program compiles for the GPU itself: Triton's are refused with a remedy.

Triton is imported by the program, perhaps long after torch, so its launcher is replaced right
after the import of the module that has it.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch_shim.errors import UnsupportedCall
from torch_shim.patching import replace
from torch_shim.tensors.handles import CudaTensor

_LAUNCHER = "triton.runtime.jit"
_REMEDY = "write it with PyTorch's operators, which run in graphs on the worker"


class _LauncherFinder(importlib.abc.MetaPathFinder):
    """Adds a step to the loader of Triton's launcher."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _LAUNCHER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as another loader does, and replaces the launch afterwards."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _replace_launch(module)


def install() -> None:
    """Refuse launches over CUDA tensors, now or when Triton is imported."""
    if _LAUNCHER in sys.modules:
        _replace_launch(sys.modules[_LAUNCHER])
    else:
        sys.meta_path.insert(0, _LauncherFinder())


def _replace_launch(module: ModuleType) -> None:
    replace(module.JITFunction, "run", _launch)


def _launch(native: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, CudaTensor) for value in (*args, *kwargs.values())):
            raise UnsupportedCall("a Triton kernel", _REMEDY)
        return native(self, *args, **kwargs)

    return run
