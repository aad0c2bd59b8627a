"""Captures calls of root modules with Dynamo, whose guards select the graph that may answer."""

import functools
import itertools
import logging
import operator
import threading
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch._dynamo.repro.after_dynamo  # torch.compile imports it at its first call, for seconds
from torch import fx
from torch._dynamo import lookup_backend
from torch._dynamo import run as run_untraced
from torch._dynamo.utils import counters

from torch_shim.advice import is_outside, users_line
from torch_shim.capture.dynamo import configure, has_operators
from torch_shim.capture.graphs import Graph
from torch_shim.capture.roots import Root, RootCall, Roots
from torch_shim.capture.traces.background import BackgroundTracer, Stage, trace
from torch_shim.capture.traces.dynamo_settings import (
    RECOMPILE_LIMIT,
    for_gpu,
    in_users_region,
    of_user,
    traces,
)
from torch_shim.capture.traces.snapshots import CallState, is_plain, snapshot
from torch_shim.leases import request_context
from torch_shim.patching import assigned, original_of
from torch_shim.process_report import GraphBreak, report
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction

log = logging.getLogger("gpufaas")

_PASSED_OVER = "Dynamo passes over its forward; its parts run in graphs"

# What fake tensors on a GPU raise in AOTAutograd, which differentiates and creates them.
_NEEDS_DRIVER = ("hasPrimaryContext", "Found no NVIDIA driver")
_OWN_OPERATORS = "its input's class has operators of its own"


# The functions that Dynamo compiles: roots of one structure share one, and so its graphs.
#
# Dynamo stores what it traced, and the guards, on a function's code object. Its guards decide for
# a new instance of a known class as they do for a known one that has changed.

ModuleCall = Callable[..., Any]

# Guards are walked one trace after the other, and Dynamo stops at its limit: roots that need a
# trace of their own get a function of their own long before.
MOST_SHARED_TRACES = 16
# After so many roots for which no graph of the others held, the next ones do not try.
MOST_MISSES = 4
# After so many traces in the background that were given up, because another thread changed what
# they had read, the caller's thread traces: a caller changes nothing while it waits for a trace.
MOST_GIVEN_UP = 3
# The structures whose functions are kept although no root has them any more.
MOST_STRUCTURES = 64

_numbers = itertools.count(1)

# Dynamo guards a module's attributes, hooks and instance methods, and functions in globals and
# closures, but not the functions of a class: after `Net.forward = other` Dynamo would keep using
# the old graph.

_KINDS = (FunctionType, classmethod, staticmethod, property)
_OF_NO_INTEREST = (torch.Tensor, ModuleType, type, FunctionType)


class Methods:
    """The functions of every class that takes part in a module's call, as first recorded."""

    def __init__(self, module: torch.nn.Module, others: Iterable[type] = ()) -> None:
        self.kinds = list(dict.fromkeys((*others, *_classes_of(module))))
        self._watched: list[tuple[Any, int, Callable[[Any], Any], Any]] = []
        for members in map(vars, self.kinds):
            names = [name for name, value in members.items() if isinstance(value, _KINDS)]
            # Of a class without functions the count tells enough.
            get: Callable[[Any], Any] = operator.itemgetter(*names) if names else bool
            self._watched.append((members, len(members), get, get(members)))

    def unchanged(self) -> bool:
        try:
            for members, count, get, functions in self._watched:
                if len(members) != count or get(members) != functions:
                    return False
        except KeyError:
            return False
        return True


def _classes_of(module: torch.nn.Module) -> Iterator[type]:
    """Yield the classes of all submodules and of the objects they hold, with bases, each once."""
    seen: set[type] = {object}
    for part in module.modules():
        for value in (part, *vars(part).values()):
            if isinstance(value, _OF_NO_INTEREST):
                continue
            for kind in type(value).__mro__:
                if kind not in seen and kind.__module__ != "builtins":
                    seen.add(kind)
                    yield kind


class CompiledFunction:
    """A function that calls a module, compiled three ways over one code object."""

    def __init__(
        self, call_module: ModuleCall, backend: Callable[..., Any], methods: Methods
    ) -> None:
        def call_root(module, *args, **kwargs):  # type: ignore[no-untyped-def]
            return call_module(module, *args, **kwargs)

        def note_graph(module: fx.GraphModule, examples: Sequence[Any]) -> Any:
            self.graphs += 1
            return backend(module, examples)

        for_gpu(note_graph)
        own = types.FunctionType(
            # The name is unique too: Dynamo uses it to remember which shapes have changed.
            call_root.__code__.replace(co_name=f"call_root_{next(_numbers)}"),
            globals(),
            "call_root",
            None,
            call_root.__closure__,
        )
        # The original, for the shim's would take it for a region of the user's.
        compiled = original_of(torch.compile)
        with assigned(traces, ours=True):
            self.traced: ModuleCall = compiled(own, backend=note_graph)
            self.whole: ModuleCall = compiled(own, backend=note_graph, fullgraph=True)
        self.untraced: ModuleCall = run_untraced(own)
        self.graphs = 0
        self.watched = 0
        self.methods = methods
        self.stage = Stage.NEW
        self.tracing = False
        self.traces = 0
        self.refused = False  # by its module, since the last trace in the background began
        self.roots: weakref.WeakSet[Root] = weakref.WeakSet()
        self.misses = 0
        self.missed_ways = MissedWays()
        self._given_up = 0

    def note_trace_end(self, module: torch.nn.Module) -> None:
        """Record the classes' methods after a trace, which may itself have replaced some."""
        if self.graphs != self.watched:
            self.watched, self.methods = self.graphs, Methods(module, self.methods.kinds)

    def end_trace(self, stage: Stage) -> None:
        if stage is Stage.NEW:
            self._given_up += 1
            if self._given_up >= MOST_GIVEN_UP:
                stage = Stage.BROKEN
        if self.stage is not Stage.BROKEN and (self.stage, stage) != (Stage.TRACED, Stage.NEW):
            self.stage = stage

    def begin_anew(self) -> None:
        """Forget a trace that failed over a call that the module refuses anyway."""
        self.stage = Stage.NEW
        self.traces -= 1

    def is_current(self) -> bool:
        """Whether the traced code is still current, in the respects that guards do not check."""
        return self.graphs == self.watched and self.methods.unchanged()

    def is_full(self) -> bool:
        """Whether roots for which no graph's guards hold shall not be traced here."""
        return self.traces >= MOST_SHARED_TRACES and len(self.roots) > 1


class CompiledFunctions:
    """Which root uses which compiled function."""

    def __init__(self, call_module: ModuleCall, backend: Callable[..., Any]) -> None:
        self._call_module = call_module
        self._backend = backend
        self._all: weakref.WeakSet[CompiledFunction] = weakref.WeakSet()
        # None: roots of this structure are too different to share a function.
        self._shared: OrderedDict[Hashable, CompiledFunction | None] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, root: Root, module: torch.nn.Module) -> CompiledFunction:
        """Return the root's function; another one if a class's methods were replaced."""
        function: CompiledFunction | None = root.function
        if function is not None and function.is_current():
            return function
        with self._lock:
            function = root.function
            if function is None or not function.methods.unchanged():
                function = self._assign(root, module)
            elif not function.is_current():  # a graph may depend on objects of other classes
                function.note_trace_end(module)
            return function

    def note_trace(self, root: Root, function: CompiledFunction) -> None:
        with self._lock:
            self._count(root, function)

    def begin_trace(self, root: Root, function: CompiledFunction) -> bool:
        """Count a trace for `root` that is about to begin in the background, if it may."""
        with self._lock:
            if function.tracing or function.traces >= RECOMPILE_LIMIT:
                return False
            self._count(root, function)
            function.tracing, function.refused = True, False
            if function.stage is Stage.NEW:
                function.stage = Stage.TRACING
            return True

    def end_trace(self, function: CompiledFunction, module: torch.nn.Module, stage: Stage) -> None:
        function.note_trace_end(module)
        with self._lock:
            function.tracing = False
            if function.refused and stage is Stage.BROKEN and not function.graphs:
                function.begin_anew()
            else:
                function.end_trace(stage)

    def note_refusal(self, function: CompiledFunction) -> None:
        """A module refused a call: that its trace failed, or will, says nothing about others."""
        with self._lock:
            function.refused = True
            if function.stage is Stage.BROKEN and not function.graphs:
                function.begin_anew()

    def separate(self, root: Root, module: torch.nn.Module) -> bool:
        """Give a root that shares a function one of its own; return whether it shared one."""
        with self._lock:
            function = root.function
            if function is None or len(function.roots) < 2:  # noqa: PLR2004 - itself and another
                return False
            self._close(function)
            function.roots.discard(root)
            root.function = self._new(root, module)
            return True

    def keep_traces(self) -> None:
        """Let traces that were made in the caller's thread answer as those of the background."""
        with self._lock:
            for function in list(self._all):
                if function.stage is Stage.NEW and function.graphs:
                    function.stage = Stage.TRACED

    def after_fork(self) -> None:
        """Reset locks and unfinished traces in a forked child, which has no tracing thread."""
        self._lock = threading.Lock()
        for function in list(self._all):
            function.tracing = False
            function.stage = Stage.NEW if function.stage is Stage.TRACING else function.stage

    def _count(self, root: Root, function: CompiledFunction) -> None:
        if function.traces and not root.traced:
            function.misses += 1  # what was traced for others does not hold for this root
            if function.misses >= MOST_MISSES:
                self._close(function)
        root.traced = True
        function.traces += 1

    def _assign(self, root: Root, module: torch.nn.Module) -> CompiledFunction:
        structure = structure_of(module)
        shared = self._shared.get(structure)
        if shared is not None and shared.methods.unchanged() and not shared.is_full():
            function = shared
        else:
            function = self._new(root, module)
            if shared is not None or structure not in self._shared:
                self._shared[structure] = function
        self._shared.move_to_end(structure)
        if len(self._shared) > MOST_STRUCTURES:
            self._shared.popitem(last=False)
        function.roots.add(root)
        root.function = function
        return function

    def _new(self, root: Root, module: torch.nn.Module) -> CompiledFunction:
        function = CompiledFunction(self._call_module, self._backend, Methods(module))
        self._all.add(function)
        function.roots.add(root)
        return function

    def _close(self, function: CompiledFunction) -> None:
        """Let no more roots share a function, nor others of their structure."""
        for structure, shared in self._shared.items():
            if shared is function:
                self._shared[structure] = None


# Attributes of these types tell variants of a class from each other. Texts are left to the guards:
# they are often names, which differ between the instances of one variant.
_PLAIN = (bool, int, float)
_OF_EVERY_MODULE = frozenset({"training"})


def structure_of(module: torch.nn.Module) -> Hashable:
    """Return what tells this module's structure from another's.

    Modules with the same structure may still differ, which Dynamo's guards notice: the structure
    only selects the graphs whose guards are asked. Tied weights and shared submodules are part of
    it: the guards do not notice parameters that are tied in one module and not in another.
    """
    numbers: dict[int, int] = {}
    return tuple(
        (type(part), tuple(_children(part, numbers)), tuple(_tensors(part, numbers)), _plain(part))
        for part in module.modules()
    )


def _children(part: torch.nn.Module, numbers: dict[int, int]) -> Iterator[Hashable]:
    for name, child in part._modules.items():  # noqa: SLF001 - children() drops the repeated ones
        yield name, None if child is None else numbers.setdefault(id(child), len(numbers))


def _tensors(part: torch.nn.Module, numbers: dict[int, int]) -> Iterator[Hashable]:
    for held in (part._parameters, part._buffers):  # noqa: SLF001 - parameters() drops tied ones
        for name, value in held.items():
            if value is None:
                yield name, None
            else:
                number = numbers.setdefault(id(value), len(numbers))
                yield name, number, tuple(value.shape), value.dtype, value.requires_grad


def _plain(part: torch.nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value)
        for name, value in vars(part).items()
        if type(value) in _PLAIN and name not in _OF_EVERY_MODULE
    )


# A call may change its arguments, as it appends to a cache: a trace needs copies that were made
# before the call. Copies cost time, so that they are made only for calls that look like one that
# missed.

_MOST_WAYS = 8
# Calls that look like one that missed, and are copied for nothing because a graph answers.
_MOST_COPIES = 16
_DENSE = (torch.Tensor, torch.nn.Parameter, CudaTensor)  # others may have no numbers as sizes
_MANY = 2  # Dynamo compiles for sizes of 0 and of 1 apart, and for all others together


class MissedWays:
    """How calls of one compiled function looked that are to be traced when they recur."""

    def __init__(self) -> None:
        self._left: dict[Hashable, int] = {}

    def recurs(self, args: Any, kwargs: Any) -> bool:
        """Whether a call looks like one that missed, so that its arguments shall be copied."""
        if not self._left:
            return False
        way = _way_of(args, kwargs)
        left = self._left.get(way, 0) - 1
        if left > 0:
            self._left[way] = left
        else:
            self._left.pop(way, None)
        return left >= 0

    def add(self, args: Any, kwargs: Any) -> None:
        """Remember a call that missed and has no copies of its arguments."""
        if len(self._left) >= _MOST_WAYS:
            self._left.pop(next(iter(list(self._left))), None)
        self._left[_way_of(args, kwargs)] = _MOST_COPIES

    def forget(self, args: Any, kwargs: Any) -> None:
        self._left.pop(_way_of(args, kwargs), None)


def _way_of(args: Any, kwargs: Any) -> Hashable:
    """What most calls with one graph have in common, found quickly."""
    return tuple(map(_look_of, args)), tuple((name, _look_of(kwargs[name])) for name in kwargs)


def _look_of(value: Any) -> Hashable:
    kind: type = type(value)
    if kind in _DENSE and not value.is_nested:
        return value.dtype, tuple(min(size, _MANY) for size in value.shape)
    return value if value is None or kind is bool else kind


class Capture:
    """Answers calls of root modules with graphs."""

    in_users_region = staticmethod(in_users_region)

    def __init__(
        self, roots: Roots, call_module: Callable[..., Any], tracer: BackgroundTracer
    ) -> None:
        self._roots = roots
        self._call_module = call_module
        self._tracer = tracer
        self.functions = CompiledFunctions(call_module, self.backend)
        # By the identity of the user's callable, which its wrapper keeps alive: Dynamo compares the
        # wrappers, to find out whether two regions have the same backend.
        self._users_backends: dict[int, Callable[..., Any]] = {}
        configure()

    def call(self, call: RootCall, *, in_background: bool) -> Any:
        """Answer a call of the current root; what lacks a graph is traced first, or meanwhile."""
        given = (*call.args, *call.kwargs.values())
        if any(has_operators(value) for value in given if type(value) is not CudaTensor):
            return call.run_locally(self._call_module, _OWN_OPERATORS)
        function = self.functions.of(call.root, call.module)
        if function.stage is Stage.SKIPPED:
            report.local_call(_PASSED_OVER, 0, call.root.name)
            with self._roots.parts_are_roots():
                return call.run(self._call_module)
        is_full = function.is_full()
        if not is_full and (not in_background or function.stage is Stage.BROKEN):
            return self._call_tracing(call, function)
        if is_full or function.stage is Stage.TRACED:
            return self._call_traced(call, function)
        self._trace(call, function)
        request_context.note_tracing()
        try:
            return call.run_locally(self._call_module, "its graph is being traced")
        except BaseException:
            self.functions.note_refusal(function)
            raise

    def _call_traced(self, call: RootCall, function: CompiledFunction) -> Any:
        """Answer from a graph whose guards hold, else run the module and have it traced."""
        root, module, args, kwargs = call
        ways = function.missed_ways
        copied = not function.tracing and ways.recurs(args, kwargs)
        copies = snapshot(module, args, kwargs) if copied else (args, kwargs)
        answer, graph_ran = self._roots.run(call, function.untraced)
        if graph_ran:
            return answer
        # No graph's guards held: it ran eagerly.
        report.local_call("a graph for this way of calling it is being traced", 0, root.name)
        request_context.note_tracing()
        if function.is_full():
            self.functions.separate(root, module)
        elif not (copied or is_plain(args, kwargs)):
            ways.add(args, kwargs)
        elif self._trace(RootCall(root, module, *copies), function):
            ways.forget(args, kwargs)
        return answer

    def _call_tracing(self, call: RootCall, function: CompiledFunction) -> Any:
        root, module = call.root, call.module
        graphs = function.graphs
        breaks = None if graphs else Counter(counters["graph_break"])
        answer, graph_ran = self._roots.run(call, function.traced)
        function.note_trace_end(module)
        if function.graphs != graphs:
            self.functions.note_trace(root, function)
            if not graph_ran:
                report.local_call("what it reads changed while it was traced", 0, root.name)
        # Dynamo marks code that it could not trace, for all roots that share the code.
        elif not (graph_ran or self.functions.separate(root, module) or function.graphs):
            function.stage = Stage.SKIPPED
            report.local_call(_PASSED_OVER, 0, root.name)
            for reason in Counter(counters["graph_break"]) - (breaks or Counter()):
                report.graph_break(GraphBreak(*users_line(), reason.partition("\n")[0]))
        return answer

    def backend(self, module: fx.GraphModule, examples: Sequence[Any]) -> Graph:
        """Turn a graph that Dynamo has captured into a callable; Dynamo calls this method."""
        report.add(graphs=1)
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

    def _trace(self, call: RootCall, function: CompiledFunction) -> bool:
        """Return whether a trace in the background begins."""
        root, module, args, kwargs = call
        if not self.functions.begin_trace(root, function):
            return False
        state = CallState()
        args, kwargs = snapshot(module, args, kwargs)

        def job() -> None:
            in_background = assigned(traces, in_background=True)
            with in_background, self._roots.tracing(root), state.restored():
                stage = trace(function.whole, (module, *args), kwargs)
            self.functions.end_trace(function, module, stage)
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
