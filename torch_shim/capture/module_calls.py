"""Intercepts calls of modules: a root module on the GPU is run through its graphs."""

import importlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torch_shim.capture.background import BackgroundTracer
from torch_shim.capture.root_modules import Root, Roots, root_of_module
from torch_shim.leases import request_context
from torch_shim.patching import replace
from torch_shim.process_report import report
from torch_shim.settings import ShimSettings
from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaTensor

if TYPE_CHECKING:
    from torch_shim.capture.capture import Capture

Module = torch.nn.Module


class ModuleCalls:
    """The replacement of `nn.Module.__call__`."""

    def __init__(self, settings: ShimSettings) -> None:
        self._native = Module.__call__
        self._roots = Roots(
            settings.address, settings.credential, early_return=settings.early_return
        )
        self._known: dict[int, Root] = {}
        self._moved: list[weakref.ref[Module]] = []
        self._made: Capture | None = None
        self._lock = threading.Lock()
        self._tracer = BackgroundTracer()
        self._importing = False
        self._in_background = settings.tracing == "background"
        if settings.stats is not None:
            report.write_at_exit(settings.stats)

    def install(self) -> None:
        """Replace `nn.Module.__call__`."""
        native, local, is_tracing = (
            self._native,
            self._roots.local,
            torch.compiler.is_dynamo_compiling,
        )
        call_root = self._call_root
        jit_state = torch._C._get_tracing_state  # noqa: SLF001 - torch.jit.is_tracing, at a tenth

        def __call__(self: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is that
            if is_tracing() or getattr(local, "root", None) is not None or jit_state() is not None:
                return native(self, *args, **kwargs)
            return call_root(self, args, kwargs)

        Module.__call__ = __call__  # type: ignore[method-assign]
        replace(Module, "_apply", self._apply)
        replace(torch, "compile", self._compile)
        os.register_at_fork(after_in_child=self._after_fork)

    def _compile(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def compile_(model: Any = None, **options: Any) -> Any:
            """Act as torch.compile; graphs over GPU tensors run on the GPU."""
            if model is None:
                return lambda decorated: compile_(decorated, **options)
            backend = options.get("backend", "inductor")
            if options.get("disable") or not isinstance(backend, str):
                return native(model, **options)
            self._import()
            assert self._made is not None
            chosen = self._made.backend_or(
                backend, options.pop("mode", None), options.pop("options", None)
            )
            return native(model, **(options | {"backend": chosen}))

        return compile_

    def _call_root(self, module: Module, args: Any, kwargs: Any) -> Any:
        root = self._root_of(module)
        if root is None:
            return self._native(module, *args, **kwargs)
        local = self._roots.local
        local.root = getattr(local, "owner", None) or root.owner
        try:
            capture = self._capture()
            if capture is not None:
                return capture.call(root, module, args, kwargs)
            report.local_call("Dynamo is being imported", 0, root.name)
            with request_context.timed_locally("Dynamo is being imported"):
                return self._native(module, *args, **kwargs)
        finally:
            local.root = None

    def _capture(self) -> "Capture | None":
        """Return the capture; None while Dynamo is imported, which takes more than a second."""
        if self._made is None and self._in_background:
            with self._lock:
                if not self._importing:
                    self._importing = True
                    self._tracer.submit(self._import)
        elif self._made is None:
            self._import()
        return self._made

    def _import(self) -> None:
        capture = importlib.import_module("torch_shim.capture.capture")
        with self._lock:
            self._made = self._made or capture.Capture(
                self._roots, self._native, self._tracer, in_background=self._in_background
            )

    def _root_of(self, module: Module) -> Root | None:
        """Return the root for a module that is called; None if its weights are not on the GPU."""
        known = self._known.get(id(module))
        if known is not None:
            return known
        if not _on_gpu(module):
            return None
        if isinstance(module, torch.jit.ScriptModule):
            report.local_call(
                "TorchScript runs as it is", _operators_of(module), "a scripted module"
            )
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

    def _apply(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `_apply` to record the modules moved as a whole, and to lay out their weights."""
        local = threading.local()

        def apply(module: Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(local, "inside", False):
                return native(module, *args, **kwargs)
            local.inside = True
            since = write_epochs.new_key()
            try:
                moved = native(module, *args, **kwargs)
            finally:
                local.inside = False
            if _on_gpu(module):
                if not any(r() is module for r in self._moved):
                    self._moved = [r for r in self._moved if r() is not None]
                    self._moved.append(weakref.ref(module))
                self._roots.lay_out_weights(module, since)
            return moved

        return apply

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        for root in list(self._known.values()):
            root.lock = threading.Lock()
        if self._made is not None:
            self._made.after_fork()
        self._roots.after_fork()
        self._tracer.after_fork()
        self._importing = False
        report.clear()


def _on_gpu(module: Module) -> bool:
    for tensor in module.parameters():
        return isinstance(tensor, CudaTensor)
    return any(isinstance(tensor, CudaTensor) for tensor in module.buffers())


def install(settings: ShimSettings) -> None:
    """Intercept calls of modules, unless the settings disable capture."""
    if settings.capture:
        ModuleCalls(settings).install()


def _operators_of(module: torch.jit.ScriptModule) -> int:
    graph = getattr(module, "inlined_graph", None)
    return _operators_in(graph) if graph is not None else 0


def _operators_in(block: Any) -> int:
    return sum(
        node.kind().startswith("aten::") + sum(map(_operators_in, node.blocks()))
        for node in block.nodes()
    )
