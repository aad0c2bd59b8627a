"""TorchScript: results of scripted functions and modules on the GPU become handles."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from torch_shim.patching import names_cuda, replace
from torch_shim.tensors.handles import PLAIN, CudaTensor, wrap

# C++'s views of a scripted module; torch has them in torch._C only, without annotations.
_TENSORS: tuple[Any, ...] = (torch._C.ParameterDict, torch._C.BufferDict)  # noqa: SLF001 - see above
_MODULES: Any = torch._C.ModuleDict  # noqa: SLF001 - see above


def install() -> None:
    replace(torch._C.ScriptFunction, "__call__", _function)  # noqa: SLF001 - its only location
    replace(torch._C.ScriptMethod, "__call__", _method)  # noqa: SLF001 - see above
    replace(torch.jit, "load", _load)


def _function(native: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = native(self, *args, **kwargs)
        leaves = _pytree.tree_leaves((args, kwargs))
        return _wrap(result, leaves) if _any_handle(leaves) else result

    return call


def _method(native: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = native(self, *args, **kwargs)
        leaves = _pytree.tree_leaves((args, kwargs))
        if _any_handle(leaves) or _on_gpu(self.owner):
            return _wrap(result, leaves)
        return result

    return call


def _any_handle(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, CudaTensor) for leaf in leaves)


def _wrap(result: Any, leaves: list[Any]) -> Any:
    return wrap(result, {id(leaf) for leaf in leaves if type(leaf) in PLAIN})


def _on_gpu(module: Any) -> bool:
    for kind in _TENSORS:
        first = next(iter(kind(module).items()), None)
        if first is not None:
            return isinstance(first[1], CudaTensor)
    return any(_on_gpu(child) for _, child in _MODULES(module).items())


def _load(native: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or not names_cuda(map_location):
            return native(f, map_location, *args, **kwargs)
        return native(f, "cpu", *args, **kwargs).cuda()

    return load
