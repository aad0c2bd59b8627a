"""Dynamo in the shim's service: set up once, then one compiled function for each root module."""

import functools
import logging
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import config, convert_frame, utils
from torch._dynamo.variables import builder

from torch_shim.graphs import Graph
from torch_shim.report import report
from torch_shim.roots import Root, Roots
from torch_shim.tensors import CudaTensor
from torch_shim.tracing import tracing

# A module may be called in many ways, and torch's own limit of 8 would send it local for good.
RECOMPILE_LIMIT = 64
ALL_RECOMPILES_LIMIT = 4096

log = logging.getLogger("gpufaas")

ModuleCall = Callable[..., Any]


class Capture:
    """Compiles root modules with guards that decide, call by call, which graph may answer."""

    def __init__(self, roots: Roots, call_module: ModuleCall) -> None:
        self._roots = roots
        self._call_module = call_module
        self._compiled: "weakref.WeakKeyDictionary[Root, ModuleCall]" = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._ready = False

    def compiled(self, root: Root) -> ModuleCall:
        """The function that answers `root`'s calls through graphs, tracing where it must."""
        found = self._compiled.get(root)
        if found is None:
            with self._lock:
                self._prepare()
                found = self._compiled.get(root) or self._compile()
                self._compiled[root] = found
        return found

    def backend(self, module: fx.GraphModule, examples: Sequence[Any]) -> Graph:
        """What Dynamo calls with every graph it has captured."""
        report.add("graphs", 1)
        return Graph(module, examples, self._roots)

    def _compile(self) -> ModuleCall:
        """A function of its own, code object included: Dynamo keeps what it learns there."""
        call_module = self._call_module

        def call_root(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
            return call_module(self, *args, **kwargs)

        own = types.FunctionType(
            call_root.__code__.replace(), globals(), "call_root", None, call_root.__closure__
        )
        compiled: ModuleCall = torch.compile(own, backend=self.backend)
        return compiled

    def _prepare(self) -> None:
        if self._ready:
            return
        configure()
        self._ready = True


def configure() -> None:
    """Set Dynamo up: hooks are guarded, and handles are tensors on a GPU to it."""
    config.skip_nnmodule_hook_guards = False
    config.allow_rnn = True
    config.recompile_limit = RECOMPILE_LIMIT
    config.accumulated_recompile_limit = ALL_RECOMPILES_LIMIT
    _replace(builder, "infer_subclass_type", _plain_to_dynamo)
    _replace(builder, "wrap_to_fake_tensor_and_record", _faked_without_history)
    _replace(utils, "run_node", _without_gradients)
    _replace(convert_frame, "_compile", _without_accelerator)


def _replace(module: types.ModuleType, name: str, around: Callable[..., Any]) -> None:
    """Put a function of ours around one of Dynamo's, which is given to it first."""
    setattr(module, name, functools.partial(around, getattr(module, name)))


def _plain_to_dynamo(native: Callable[..., Any], value: Any) -> Any:
    """A handle is a plain tensor; its fake takes the device from the handle's property."""
    return None if isinstance(value, CudaTensor) else native(value)


def _faked_without_history(
    native: Callable[..., Any], value: Any, *args: Any, **kwargs: Any
) -> Any:
    """A fake on a GPU must know no gradients: autograd would ask a CUDA stream, and abort."""
    if isinstance(value, CudaTensor) and value.requires_grad:
        data = value.data
        value = torch.nn.Parameter(data, False) if isinstance(value, torch.nn.Parameter) else data
    return native(value, *args, **kwargs)


def _without_gradients(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Operators on fakes leave no history either."""
    with torch.no_grad():
        return native(*args, **kwargs)


def _without_accelerator(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """While Dynamo traces there is no stream to ask about."""
    start_s = time.perf_counter()
    with tracing():
        result = native(*args, **kwargs)
    report.add("trace_s", time.perf_counter() - start_s)
    return result
