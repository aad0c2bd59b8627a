"""TorchScript: what a scripted or traced module on the GPU returns is on the GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from torch_shim.devices import names_cuda
from torch_shim.patching import replace
from torch_shim.tensors import PLAIN, CudaTensor, wrap


class HandleMethod:
    """A method of a scripted module, which C++ runs, with results of the right class."""

    def __init__(self, method: Any, module: Any) -> None:
        self._method = method
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method."""
        result = self._method(*args, **kwargs)
        leaves = _pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, CudaTensor) for leaf in leaves) or _on_gpu(self._module):
            wrap(result, {id(leaf) for leaf in leaves if type(leaf) in PLAIN})
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


def install() -> None:
    """Wraps the methods of scripted modules, and what runs and loads them."""
    replace(torch.jit.RecursiveScriptModule, "__getattr__", _attribute)
    replace(torch.jit, "load", _load)


def _attribute(native: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def attribute(self: Any, name: str) -> Any:
        value = native(self, name)
        if isinstance(value, torch._C.ScriptMethod):  # noqa: SLF001 - the type's only home
            value = HandleMethod(value, self)
            self.__dict__[name] = value  # where TorchScript keeps the bare one
        return value

    return attribute


def _on_gpu(module: torch.nn.Module) -> bool:
    first = next(module.parameters(), None)
    first = next(module.buffers(), None) if first is None else first
    return isinstance(first, CudaTensor)


def _load(native: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or not names_cuda(map_location):
            return native(f, map_location, *args, **kwargs)
        return native(f, "cpu", *args, **kwargs).cuda()

    return load
