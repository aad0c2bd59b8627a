"""Captures calls of root modules with Dynamo, whose guards select the graph that may answer."""

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

from torch_shim.advice import is_outside, users_line
from torch_shim.capture.compiled_functions import CompiledFunction, CompiledFunctions
from torch_shim.capture.dynamo import configure
from torch_shim.capture.graphs import Graph
from torch_shim.capture.root_modules import Root, Roots
from torch_shim.capture.traces.background import BackgroundTracer, Stage, trace
from torch_shim.capture.traces.dynamo_settings import (
    for_gpu,
    in_background,
    in_users_region,
    of_user,
)
from torch_shim.capture.traces.snapshots import CallState, is_plain, snapshot
from torch_shim.capture.traces.tensor_classes import has_operators
from torch_shim.leases import request_context
from torch_shim.process_report import GraphBreak, report
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction

log = logging.getLogger("gpufaas")

_PASSED_OVER = "Dynamo passes over its forward; its parts run in graphs"

# What fake tensors on a GPU raise in AOTAutograd, which differentiates and creates them.
_NEEDS_DRIVER = ("hasPrimaryContext", "Found no NVIDIA driver")
_OWN_OPERATORS = "its input's class has operators of its own"


class Capture:
    """Answers calls of root modules with graphs."""

    def __init__(
        self,
        roots: Roots,
        call_module: Callable[..., Any],
        tracer: BackgroundTracer,
        *,
        in_background: bool,
    ) -> None:
        self._roots = roots
        self._call_module = call_module
        self._in_background = in_background
        self._tracer = tracer
        self._functions = CompiledFunctions(call_module, self.backend)
        # By the identity of the user's callable, which its wrapper keeps alive: Dynamo compares the
        # wrappers, to find out whether two regions have the same backend.
        self._users_backends: dict[int, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        configure()

    def call(self, root: Root, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """`root` is the thread's current root."""
        if any(map(has_operators, args)) or any(map(has_operators, kwargs.values())):
            report.local_call(_OWN_OPERATORS, 0, root.name)
            with request_context.timed_locally(_OWN_OPERATORS):
                return self._call_module(module, *args, **kwargs)
        function = self._functions.of(root, module)
        if function.stage is Stage.SKIPPED:
            report.local_call(_PASSED_OVER, 0, root.name)
            with self._roots.parts_are_roots():
                return self._call_module(module, *args, **kwargs)
        is_full = function.is_full()
        if not is_full and (not self._in_background or function.stage is Stage.BROKEN):
            return self._call_tracing(root, function, module, args, kwargs)
        if not is_full and function.stage is not Stage.TRACED:
            self._trace(root, function, module, args, kwargs)
            report.local_call("its graph is being traced", 0, root.name)
            request_context.note_tracing()
            try:
                with request_context.timed_locally("its graph is being traced"):
                    return self._call_module(module, *args, **kwargs)
            except BaseException:
                self._functions.note_refusal(function)
                raise
        return self._call_traced(root, function, module, args, kwargs)

    def _call_traced(
        self,
        root: Root,
        function: CompiledFunction,
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Answer from a graph whose guards hold, else run the module and have it traced."""
        ways = function.missed_ways
        copied = not function.tracing and ways.recurs(args, kwargs)
        copies = snapshot(module, args, kwargs) if copied else (args, kwargs)
        before = self._roots.graphs_run()
        answer = function.untraced(module, *args, **kwargs)
        if self._roots.graphs_run() > before:
            return answer
        # No graph's guards held: it ran eagerly.
        report.local_call("a graph for this way of calling it is being traced", 0, root.name)
        request_context.note_tracing()
        if function.is_full():
            self._functions.separate(root, module)
        elif not (copied or is_plain(args, kwargs)):
            ways.add(args, kwargs)
        elif self._trace(root, function, module, *copies):
            ways.forget(args, kwargs)
        return answer

    def _call_tracing(
        self,
        root: Root,
        function: CompiledFunction,
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Any:
        graphs, before = function.graphs, self._roots.graphs_run()
        breaks = Counter(counters["graph_break"])
        answer = function.traced(module, *args, **kwargs)
        function.note_trace_end(module)
        if function.graphs != graphs:
            self._functions.note_trace(root, function)
            if self._roots.graphs_run() == before:
                report.local_call("what it reads changed while it was traced", 0, root.name)
        elif self._roots.graphs_run() > before:
            return answer
        # Dynamo marks code that it could not trace, for all roots that share the code.
        elif not self._functions.separate(root, module) and function.graphs == 0:
            function.stage = Stage.SKIPPED
            report.local_call(_PASSED_OVER, 0, root.name)
            for reason in Counter(counters["graph_break"]) - breaks:
                report.graph_break(GraphBreak(*users_line(), reason.partition("\n")[0]))
        return answer

    def trace_in_background(self) -> None:
        """Trace in the background from now on; what was traced before answers as it did."""
        self._in_background = True
        self._functions.keep_traces()

    def after_fork(self) -> None:
        """Reset locks and unfinished traces in a forked child, which has no tracing thread."""
        self._lock = threading.Lock()
        self._functions.after_fork()

    def backend(self, module: fx.GraphModule, examples: Sequence[Any]) -> Graph:
        """Turn a graph that Dynamo has captured into a callable; Dynamo calls this method."""
        report.add("graphs", 1)
        _note_break(module)
        with NoTorchFunction():  # what a class notes of reads here, Dynamo would guard
            return Graph(module, examples, self._roots)

    def backend_or(self, name: str, mode: str | None, options: Any) -> Callable[..., Any]:
        """Return a backend that handles graphs over GPU tensors and leaves others to `name`."""

        def choose(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            if any(isinstance(value, CudaTensor) for value in examples):
                return self.backend(module, examples)
            if name == "inductor":
                wrapper = torch._TorchCompileInductorWrapper(mode, options, None)  # noqa: SLF001 - what torch.compile makes
                compiled: Callable[..., Any] = wrapper(module, examples)
            else:
                compiled = lookup_backend(name)(module, list(examples))
            return compiled

        return for_gpu(choose)

    def backend_of_user(self, users: Callable[..., Any]) -> Callable[..., Any]:
        """Return the user's backend; a graph that it returns as a graph runs on the GPU."""
        backend = self._users_backends.get(id(users))
        if backend is not None:
            return backend

        def call_users(module: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
            on_gpu = any(isinstance(value, CudaTensor) for value in examples)
            try:
                compiled = users(module, examples, **options)
            except RuntimeError as error:
                if not on_gpu or not any(words in str(error) for words in _NEEDS_DRIVER):
                    raise
                log.warning("%s: this backend needs a CUDA driver in the function", error)
                compiled = module
            graph = _graph_of(compiled)
            return self.backend(graph, examples) if graph is not None and on_gpu else compiled

        functools.update_wrapper(call_users, users)
        self._users_backends[id(users)] = of_user(call_users)
        return call_users

    def in_users_region(self) -> bool:
        return in_users_region()

    def _trace(
        self,
        root: Root,
        function: CompiledFunction,
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
    ) -> bool:
        """Return whether a trace in the background begins."""
        if not self._functions.begin_trace(root, function):
            return False
        state, refusals = CallState(), function.refusals
        args, kwargs = snapshot(module, args, kwargs)

        def job() -> None:
            with in_background(), self._roots.tracing(root), state.restored():
                stage = trace(function.whole, (module, *args), kwargs)
            self._functions.end_trace(function, module, stage, refusals)
            if stage is Stage.TRACED:
                self._roots.prepare(root.owner)

        self._tracer.submit(job)
        return True


def _graph_of(function: Any) -> fx.GraphModule | None:
    """Return the graph that this is, or whose `forward` it is, if Dynamo's notes are complete."""
    owner = getattr(function, "__self__", None)
    graph = owner if getattr(function, "__name__", "") == "forward" else function
    if not isinstance(graph, fx.GraphModule):
        return None
    return graph if all("example_value" in node.meta for node in _calls(graph)) else None


def _calls(graph: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in graph.graph.nodes if node.op.startswith("call_"))


def _note_break(module: fx.GraphModule) -> None:
    """If this graph ended before the module did, report the place and the reason."""
    end = getattr(module, "compile_subgraph_reason", None)
    if end is not None and end.graph_break and end.user_stack:
        outside = [line for line in end.user_stack if is_outside(line.filename)]
        line = (outside or end.user_stack)[-1]
        reason = str(end.reason).strip().partition("\n")[0]
        report.graph_break(GraphBreak(line.filename, line.lineno or 0, reason))
