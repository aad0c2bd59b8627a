"""TorchScript: results of scripted functions and modules on the GPU become handles."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from torch_shim.patching import names_cuda, redirect
from torch_shim.tensors.handles import PLAIN, CudaTensor, wrap

# C++'s views of a scripted module; torch has them in torch._C only, without annotations.
_TENSORS: tuple[Any, ...] = (torch._C.ParameterDict, torch._C.BufferDict)  # noqa: SLF001 - see above
_MODULES: Any = torch._C.ModuleDict  # noqa: SLF001 - see above
_METHOD: Any = torch._C.ScriptMethod  # noqa: SLF001 - see above


def install() -> None:
    redirect(torch._C.ScriptFunction, "__call__", _call)  # noqa: SLF001 - its only location
    redirect(_METHOD, "__call__", _call)
    redirect(torch.jit, "load", _load)


def _call(native: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a scripted function, or the method of a scripted module, which owns it."""
    result = native(self, *args, **kwargs)
    leaves = _pytree.tree_leaves((args, kwargs))
    on_gpu = any(isinstance(leaf, CudaTensor) for leaf in leaves)
    if on_gpu or (isinstance(self, _METHOD) and _on_gpu(self.owner)):
        return wrap(result, {id(leaf) for leaf in leaves if type(leaf) in PLAIN})
    return result


def _on_gpu(module: Any) -> bool:
    for kind in _TENSORS:
        first = next(iter(kind(module).items()), None)
        if first is not None:
            return isinstance(first[1], CudaTensor)
    return any(_on_gpu(child) for _, child in _MODULES(module).items())


def _load(
    native: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if map_location is None or not names_cuda(map_location):
        return native(f, map_location, *args, **kwargs)
    return native(f, "cpu", *args, **kwargs).cuda()
