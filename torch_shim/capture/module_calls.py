"""Intercepts calls of modules: a root module on the GPU is run through its graphs."""

import functools
import importlib
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints

from torch_shim.capture.roots import Root, RootCall, Roots, pauses, root_of_module, weights_of
from torch_shim.capture.traces.background import BackgroundTracer, at_imports
from torch_shim.collector_pause import without_collections
from torch_shim.leases import request_context
from torch_shim.leases.managers import Nodes
from torch_shim.patching import CPU, assigned, redirect
from torch_shim.process_report import report
from torch_shim.settings import ShimSettings
from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaTensor
from torch_shim.weights import process_weights

if TYPE_CHECKING:
    from torch_shim.capture.root_calls import Capture

Module = torch.nn.Module
_in_transform = torch._C._functorch.maybe_current_level  # noqa: SLF001 - no public question


class ModuleCalls:
    """The replacement of `nn.Module.__call__`."""

    def __init__(self, settings: ShimSettings) -> None:
        self._native = Module.__call__
        self.roots = Roots(settings.address, settings.credential)
        self._known: dict[int, Root] = {}
        self._users_have_backends = False
        self._users_compiled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._moved: list[weakref.ref[Module]] = []
        self._made: Capture | None = None
        self._lock = threading.Lock()
        self._import_lock = threading.Lock()
        self._tracer = BackgroundTracer()
        self._importing = False
        self._in_background = settings.tracing == "background"
        if settings.stats is not None:
            report.write_at_exit(settings.stats)
        report.expect_modules()

    def install(self) -> Callable[[], Nodes] | None:
        """Return what the process's sessions are had from, which a fork and a reset make anew."""
        native, call_root, local = self._native, self._call_root, self.roots.local
        is_tracing = torch.compiler.is_dynamo_compiling
        jit_state = torch._C._get_tracing_state  # noqa: SLF001 - torch.jit.is_tracing, at a tenth

        def __call__(self: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is that
            if is_tracing() or local.root is not None or jit_state() is not None:
                return native(self, *args, **kwargs)
            return call_root(self, args, kwargs)

        Module.__call__ = __call__  # type: ignore[method-assign]
        redirect(Module, "_apply", self._apply)
        redirect(torch, "compile", self._compile)
        _install_checkpoints(self.roots)
        os.register_at_fork(after_in_child=self._after_fork)
        _installed.append(self)
        return (lambda: self.roots.leases.nodes) if self.roots.has_manager else None

    def import_tracing(self) -> None:
        """Import Dynamo, and make what captures."""
        # A lock of its own: calls that run locally meanwhile take the other one.
        # In the background other threads go on, and what they leave is to be collected.
        pause = nullcontext() if self._in_background else without_collections()
        with self._import_lock, at_imports(), pause:
            capture = importlib.import_module("torch_shim.capture.root_calls")
            self._made = self._made or capture.Capture(self.roots, self._native, self._tracer)

    def trace_in_background(self) -> None:
        """Trace in the background from now on; what was traced before answers as it did."""
        self._in_background = True
        if self._made is not None:
            self._made.functions.keep_traces()

    def _compile(self, native: Callable[..., Any], model: Any = None, **options: Any) -> Any:
        """Act as torch.compile; graphs over GPU tensors run on the GPU."""
        if model is None:
            return lambda decorated: self._compile(native, decorated, **options)
        backend = options.get("backend", "inductor")
        if options.get("disable"):
            return native(model, **options)
        self.import_tracing()
        assert self._made is not None
        if isinstance(backend, str):
            chosen = self._made.backend_or(
                backend, options.pop("mode", None), options.pop("options", None)
            )
            return native(model, **(options | {"backend": chosen}))
        chosen = self._made.backend_of_user(backend)
        compiled = native(model, **(options | {"backend": chosen}))
        self._users_compiled.add(compiled)
        self._users_have_backends = True
        return compiled

    def _call_root(self, module: Module, args: Any, kwargs: Any) -> Any:
        root = None if self._users_trace(module) else self._root_of(module)
        if root is None:
            return self._native(module, *args, **kwargs)
        if _in_transform() is not None:
            return self._call_transformed(root, module, args, kwargs)
        local = self.roots.local
        local.root = local.owner or root.owner
        pauses.begin_call()
        try:
            capture = self._capture()
            call = RootCall(root, module, args, kwargs)
            if capture is not None:
                return capture.call(call, in_background=self._in_background)
            request_context.note_tracing()
            return call.run_locally(self._native, "Dynamo is being imported")
        finally:
            pauses.end_call()
            local.root = None

    def _call_transformed(self, root: Root, module: Module, args: Any, kwargs: Any) -> Any:
        """Run a module over tensors that torch.func wraps, which Dynamo does not trace."""
        its_parts_are_no_roots = assigned(self.roots.local, root=root.owner)
        with its_parts_are_no_roots, OperatorCount() as count:
            answer = self._native(module, *args, **kwargs)
        report.local_call("a transform of torch.func calls it", count.operators, root.name)
        return answer

    def _users_trace(self, module: Module) -> bool:
        """Whether the call is part of what a user compiles with a backend of their own."""
        if not self._users_have_backends:
            return False
        assert self._made is not None, "made with the first of these"
        # First of all: inside such a region Dynamo would trace the code of the set as well.
        if self._made.in_users_region():
            return True
        return module in self._users_compiled or module._compiled_call_impl in self._users_compiled  # noqa: SLF001 - what `module.compile()` sets

    def _capture(self) -> "Capture | None":
        """Return the capture; None while Dynamo is imported, which takes more than a second."""
        if self._made is None and self._in_background:
            if self._importing:
                return None
            with self._lock:
                if not self._importing:
                    self._importing = True
                    self._tracer.submit(self.import_tracing)
        elif self._made is None:
            self.import_tracing()
        return self._made

    def _root_of(self, module: Module) -> Root | None:
        """Return the root for a module that is called; None if its weights are not on the GPU."""
        known = self._known.get(id(module))
        if known is not None:
            return known
        if not _on_gpu(module):
            return None
        if isinstance(module, torch.jit.ScriptModule):
            graph = getattr(module, "inlined_graph", None)
            operators = 0 if graph is None else _operators_in(graph)
            report.local_call("TorchScript runs as it is", operators, "a scripted module")
            return None
        if any(map(torch.nn.parameter.is_lazy, module.parameters())):
            return None  # the first call creates the parameters, with random values
        root = root_of_module(module)
        enclosing = self._enclosing_root(module)
        if enclosing is not None:
            root.owner = enclosing
        identity = id(module)
        with self._lock:
            root = self._known.setdefault(identity, root)
        weakref.finalize(module, self._known.pop, identity, None).atexit = False
        return root

    def _enclosing_root(self, module: Module) -> Root | None:
        """Return the root that was moved to the GPU with this module (say, an encoder) inside."""
        for reference in reversed(self._moved):
            moved = reference()
            if (
                moved is not None
                and moved is not module
                and any(p is module for p in moved.modules())
            ):
                return self._root_of(moved)
        return None

    def _apply(self, native: Callable[..., Any], module: Module, *args: Any, **kwargs: Any) -> Any:
        """Record the modules that are moved as a whole, and lay out their weights."""
        local = self.roots.local
        if local.moves:
            return native(module, *args, **kwargs)
        since = write_epochs.new_key()
        with assigned(local, moves=True):
            moved = native(module, *args, **kwargs)
        if _on_gpu(module):
            if not any(r() is module for r in self._moved):
                self._moved = [r for r in self._moved if r() is not None]
                self._moved.append(weakref.ref(module))
            if self.roots.has_manager:
                process_weights.lay_out_weights(weights_of(module), since)
        return moved

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._import_lock = threading.Lock()
        for root in list(self._known.values()):
            root.lock = threading.Lock()
        if self._made is not None:
            self._made.functions.after_fork()
        self.roots.after_fork()
        self._tracer.after_fork()
        self._importing = False
        report.clear()


def _on_gpu(module: Module) -> bool:
    for tensor in module.parameters():
        return isinstance(tensor, CudaTensor)
    return any(isinstance(tensor, CudaTensor) for tensor in module.buffers())


def install(settings: ShimSettings) -> Callable[[], Nodes] | None:
    """Intercept calls of modules, unless the settings disable capture; return the sessions."""
    return ModuleCalls(settings).install() if settings.capture else None


# What a process does that instances are forked from.
#
# It waits for its traces, since it has one thread when it is forked, and no connection: no fork may
# share a session. An instance then traces in the background, as any does.

_installed: list[ModuleCalls] = []


def import_tracing() -> None:
    """Import what traces need: more than a second that no fork then spends."""
    for calls in _installed:
        calls.import_tracing()


def close_sessions() -> None:
    """End all sessions and leases; the next GPU call opens them anew."""
    for calls in _installed:
        calls.roots.close_sessions()


def trace_in_background() -> None:
    """Let calls run locally while a new graph is traced, and be answered by the known ones."""
    for calls in _installed:
        calls.trace_in_background()


# Activation checkpointing: the backward pass repeats a region exactly as the forward pass ran it.
#
# Torch compares what both passes save. A graph saves other tensors than the same operators on
# handles, and which of the two runs changes with every trace and with the first backward pass.


def _install_checkpoints(roots: Roots) -> None:
    """Run what records gradients in checkpointed regions without graphs."""
    # From torch 2.15 on all ways of calling the second meet in the first.
    name = "_checkpoint_impl" if hasattr(checkpoints, "_checkpoint_impl") else "checkpoint"
    redirect(checkpoints, name, functools.partial(_checkpoint, roots))
    checks: dict[str, Any] = checkpoints._allowed_determinism_checks_to_fns  # noqa: SLF001 - its only location
    checks["default"] = _without_class(checks["default"])


def _checkpoint(
    roots: Roots, native: Callable[..., Any], /, function: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if function is None or not torch.is_grad_enabled():
        return native(function, *args, **kwargs)

    @functools.wraps(function, updated=())
    def without_graphs(*given: Any, **named: Any) -> Any:
        with roots.repeated():
            return function(*given, **named)

    return native(without_graphs, *args, **kwargs)


def _without_class(native: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Describe a tensor without telling handles apart: of C++ come plain ones, in either pass."""

    def extract(tensor: torch.Tensor) -> dict[str, Any]:
        description = native(tensor)
        return description | {"device": CPU} if isinstance(tensor, CudaTensor) else description

    return extract


_READS = frozenset({"__get__", "size", "dim", "stride", "is_floating_point", "numel"})


class OperatorCount(TorchFunctionMode):
    """Counts the operators that Python calls inside of the `with` block."""

    operators = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.operators += getattr(func, "__name__", "") not in _READS
        return func(*args, **(kwargs or {}))


def _operators_in(block: Any) -> int:
    return sum(
        node.kind().startswith("aten::") + sum(map(_operators_in, node.blocks()))
        for node in block.nodes()
    )
