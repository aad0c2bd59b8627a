"""The functions that Dynamo compiles: roots of one structure share one, and so its graphs.

Dynamo stores what it traced, and the guards, on a function's code object. Its guards decide for a
new instance of a known class as they do for a known one that has changed.
"""

import itertools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch._dynamo.repro.after_dynamo  # torch.compile imports it at its first call, for seconds
from torch import fx
from torch._dynamo import run as run_untraced

from torch_shim.capture.background import Stage
from torch_shim.capture.module_structure import structure_of
from torch_shim.capture.replaced_methods import Methods
from torch_shim.capture.root_modules import Root
from torch_shim.capture.traces.dynamo_settings import RECOMPILE_LIMIT, for_gpu, tracing
from torch_shim.capture.traces.missed_ways import MissedWays
from torch_shim.patching import original_of

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
        with tracing(ours=True):
            self.traced: ModuleCall = compiled(own, backend=note_graph)
            self.whole: ModuleCall = compiled(own, backend=note_graph, fullgraph=True)
        self.untraced: ModuleCall = run_untraced(own)
        self.graphs = 0
        self.watched = 0
        self.methods = methods
        self.stage = Stage.NEW
        self.tracing = False
        self.traces = 0
        self.refusals = 0
        self.roots: weakref.WeakSet[Root] = weakref.WeakSet()
        self.misses = 0
        self.missed_ways = MissedWays()
        self._given_up = 0

    def note_trace_end(self, module: torch.nn.Module) -> None:
        """Record the classes' methods after a trace, which may itself have replaced some."""
        if self.graphs != self.watched:
            self.watched, self.methods = self.graphs, Methods(module, self.methods.kinds)

    def end_trace(self, stage: Stage) -> None:
        """Record how a trace in the background ended."""
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
        self._of_root: weakref.WeakKeyDictionary[Root, CompiledFunction] = (
            weakref.WeakKeyDictionary()
        )
        # None: roots of this structure are too different to share a function.
        self._shared: OrderedDict[Hashable, CompiledFunction | None] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, root: Root, module: torch.nn.Module) -> CompiledFunction:
        """Return the root's function; another one if a class's methods were replaced."""
        function = self._of_root.get(root)
        if function is not None and function.is_current():
            return function
        with self._lock:
            function = self._of_root.get(root)
            if function is None or not function.methods.unchanged():
                function = self._assign(root, module)
            elif not function.is_current():  # a graph may depend on objects of other classes
                function.note_trace_end(module)
            return function

    def note_trace(self, root: Root, function: CompiledFunction) -> None:
        """Count a trace that was made in a call of `root`."""
        with self._lock:
            self._count(root, function)

    def begin_trace(self, root: Root, function: CompiledFunction) -> bool:
        """Count a trace for `root` that is about to begin in the background, if it may."""
        with self._lock:
            if function.tracing or function.traces >= RECOMPILE_LIMIT:
                return False
            self._count(root, function)
            function.tracing = True
            if function.stage is Stage.NEW:
                function.stage = Stage.TRACING
            return True

    def end_trace(
        self, function: CompiledFunction, module: torch.nn.Module, stage: Stage, refusals: int
    ) -> None:
        """Record how a trace in the background ended, that began after so many refusals."""
        function.note_trace_end(module)
        with self._lock:
            function.tracing = False
            if function.refusals == refusals or stage is not Stage.BROKEN or function.graphs:
                function.end_trace(stage)
            else:
                function.begin_anew()

    def note_refusal(self, function: CompiledFunction) -> None:
        """A module refused a call: that its trace failed, or will, says nothing about others."""
        with self._lock:
            function.refusals += 1
            if function.stage is Stage.BROKEN and not function.graphs:
                function.begin_anew()

    def separate(self, root: Root, module: torch.nn.Module) -> bool:
        """Give a root that shares a function one of its own; return whether it shared one."""
        with self._lock:
            function = self._of_root.get(root)
            if function is None or len(function.roots) < 2:  # noqa: PLR2004 - itself and another
                return False
            self._close(function)
            function.roots.discard(root)
            self._of_root[root] = self._new(root, module)
            return True

    def keep_traces(self) -> None:
        """Let traces that were made in the caller's thread answer as those of the background."""
        with self._lock:
            for function in list(self._of_root.values()):
                if function.stage is Stage.NEW and function.graphs:
                    function.stage = Stage.TRACED

    def after_fork(self) -> None:
        """Reset locks and unfinished traces in a forked child, which has no tracing thread."""
        self._lock = threading.Lock()
        for function in list(self._of_root.values()):
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
        self._of_root[root] = function
        return function

    def _new(self, root: Root, module: torch.nn.Module) -> CompiledFunction:
        function = CompiledFunction(self._call_module, self._backend, Methods(module))
        function.roots.add(root)
        return function

    def _close(self, function: CompiledFunction) -> None:
        """Let no more roots share a function, nor others of their structure."""
        for structure, shared in self._shared.items():
            if shared is function:
                self._shared[structure] = None
