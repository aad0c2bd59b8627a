"""Captures calls of root modules with Dynamo: one compiled function for each root module."""

import itertools
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import lookup_backend
from torch._dynamo import run as run_untraced
from torch._dynamo.exc import TorchDynamoException

from torch_shim.capture.background import BackgroundTracer, Stage, trace
from torch_shim.capture.call_state import CallState
from torch_shim.capture.dynamo import RECOMPILE_LIMIT, configure
from torch_shim.capture.graphs import Graph
from torch_shim.capture.replaced_methods import Methods
from torch_shim.capture.root_modules import Root, Roots
from torch_shim.leases import request_context
from torch_shim.process_report import GraphBreak, report
from torch_shim.tensors.handles import CudaTensor

ModuleCall = Callable[..., Any]

_numbers = itertools.count(1)


class Capture:
    """Answers calls of root modules with graphs; Dynamo's guards select the graph."""

    def __init__(
        self,
        roots: Roots,
        call_module: ModuleCall,
        tracer: BackgroundTracer,
        *,
        in_background: bool,
    ) -> None:
        self._roots = roots
        self._call_module = call_module
        self._in_background = in_background
        self._tracer = tracer
        self._entries: weakref.WeakKeyDictionary[Root, _CompiledFunction] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        configure()

    def call(self, root: Root, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the module's result; `root` is the thread's current root."""
        entry = self._entry(root, module)
        if entry.stage is Stage.SKIPPED:
            report.local_call(
                "Dynamo passes over its forward; its parts run in graphs", 0, root.name
            )
            with self._roots.parts_are_roots():
                return self._call_module(module, *args, **kwargs)
        if not self._in_background or entry.stage is Stage.BROKEN:
            return self._call_tracing(entry, module, args, kwargs)
        if entry.stage is not Stage.TRACED:
            self._trace(root, entry, module, args, kwargs)
            report.local_call("its graph is being traced", 0, root.name)
            with request_context.timed_locally("its graph is being traced"):
                return self._call_module(module, *args, **kwargs)
        before = self._roots.graphs_run()
        answer = entry.untraced(module, *args, **kwargs)
        if self._roots.graphs_run() == before:  # no graph's guards held: the module ran eagerly
            report.local_call("a graph for this way of calling it is being traced", 0, root.name)
            self._trace(root, entry, module, args, kwargs)
        return answer

    def _call_tracing(
        self, entry: "_CompiledFunction", module: torch.nn.Module, args: Any, kwargs: Any
    ) -> Any:
        before = self._roots.graphs_run()
        answer = entry.traced(module, *args, **kwargs)
        entry.note_trace_end(module)
        if entry.graphs == 0 and self._roots.graphs_run() == before:
            entry.stage = Stage.SKIPPED
        return answer

    def after_fork(self) -> None:
        """Reset locks and unfinished traces in a forked child, which has no tracing thread."""
        self._lock = threading.Lock()
        for entry in list(self._entries.values()):
            entry.tracing = False
            entry.stage = Stage.NEW if entry.stage is Stage.TRACING else entry.stage

    def backend(self, module: fx.GraphModule, examples: Sequence[Any]) -> Graph:
        """Turn a graph that Dynamo has captured into a callable; Dynamo calls this method."""
        report.add("graphs", 1)
        _note_break(module)
        return Graph(module, examples, self._roots)

    def backend_or(self, name: str, mode: str | None, options: Any) -> Callable[..., Any]:
        """Return a backend that handles graphs over GPU tensors and leaves others to `name`."""

        def choose(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            if any(isinstance(value, CudaTensor) for value in examples):
                return self.backend(module, examples)
            if name == "inductor":
                wrapper = torch._TorchCompileInductorWrapper(mode, options, None)  # noqa: SLF001 - what torch.compile makes
                found: Callable[..., Any] = wrapper(module, examples)
            else:
                found = lookup_backend(name)(module, list(examples))
            return found

        return choose

    def _entry(self, root: Root, module: torch.nn.Module) -> "_CompiledFunction":
        """Return the root's compiled function; a new one if a class's methods were replaced."""
        entry = self._entries.get(root)
        if entry is not None and entry.is_current():
            return entry
        with self._lock:
            entry = self._entries.get(root)
            if entry is None or not entry.methods.unchanged():
                entry = _CompiledFunction(self._call_module, self.backend, Methods(module))
                self._entries[root] = entry
            elif not entry.is_current():  # a new graph may depend on objects of other classes
                entry.watched, entry.methods = entry.graphs, Methods(module)
            return entry

    def _trace(
        self,
        root: Root,
        entry: "_CompiledFunction",
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
    ) -> None:
        with self._lock:
            if entry.tracing or entry.traces >= RECOMPILE_LIMIT:
                return
            entry.tracing = True
            entry.traces += 1
            if entry.stage is Stage.NEW:
                entry.stage = Stage.TRACING
        state = CallState()

        def job() -> None:
            with self._roots.tracing(root), state.restored():
                stage = trace(entry.whole, (module, *args), kwargs, TorchDynamoException)
            entry.stage = Stage.BROKEN if Stage.BROKEN in (stage, entry.stage) else stage
            entry.note_trace_end(module)
            entry.tracing = False
            if stage is Stage.TRACED:
                self._roots.prepare(root)

        self._tracer.submit(job)


class _CompiledFunction:
    """One root module's function, compiled three ways over the same code object.

    Dynamo stores its results on the code object, so each root module gets a separate one.
    """

    def __init__(
        self, call_module: ModuleCall, backend: Callable[..., Any], methods: Methods
    ) -> None:
        def call_root(module, *args, **kwargs):  # type: ignore[no-untyped-def]
            return call_module(module, *args, **kwargs)

        def note_graph(module: fx.GraphModule, examples: Sequence[Any]) -> Any:
            self.graphs += 1
            return backend(module, examples)

        own = types.FunctionType(
            # The name is unique too: Dynamo uses it to remember which shapes have changed.
            call_root.__code__.replace(co_name=f"call_root_{next(_numbers)}"),
            globals(),
            "call_root",
            None,
            call_root.__closure__,
        )
        self.traced: ModuleCall = torch.compile(own, backend=note_graph)
        self.whole: ModuleCall = torch.compile(own, backend=note_graph, fullgraph=True)
        self.untraced: ModuleCall = run_untraced(own)
        self.graphs = 0
        self.watched = 0
        self.methods = methods
        self.stage = Stage.NEW
        self.tracing = False
        self.traces = 0

    def note_trace_end(self, module: torch.nn.Module) -> None:
        """Record the classes' methods after a trace, which may itself have replaced some."""
        if self.graphs != self.watched:
            self.watched, self.methods = self.graphs, Methods(module)

    def is_current(self) -> bool:
        """Whether the traced code is still current, in the respects that guards do not check."""
        return self.graphs == self.watched and self.methods.unchanged()


def _note_break(module: fx.GraphModule) -> None:
    """If this graph ended before the module did, report the place and the reason."""
    found = getattr(module, "compile_subgraph_reason", None)
    if found is not None and found.graph_break and found.user_stack:
        line = found.user_stack[-1]
        reason = str(found.reason).strip().partition("\n")[0]
        report.graph_break(GraphBreak(line.filename, line.lineno or 0, reason))
