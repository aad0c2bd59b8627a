"""The root modules whose calls are captured, and the threads that call them or trace."""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from torch_shim.errors import NoWeights
from torch_shim.leases import request_context
from torch_shim.leases.leasing import ModelWeights, ProcessLeases
from torch_shim.leases.managers import Nodes
from torch_shim.patching import assigned
from torch_shim.process_report import report
from torch_shim.tensors import absent_bytes
from torch_shim.tensors.handles import become_cuda


class Abandoned(Exception):
    """A traced graph was about to run in the tracing thread."""


class Root(ModelWeights):
    """The weights of a module that user code calls directly, or the parameters among the inputs
    of a function that user code compiled."""

    def __init__(self, name: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        super().__init__(name, tensors)
        self.owner = self  # the root whose model contains these weights
        self.function: Any = None  # the `CompiledFunction` that answers its calls
        self.traced = False  # whether a call of it was traced


def root_of_module(module: torch.nn.Module) -> Root:
    """The root does not keep the module alive."""
    reference = weakref.ref(module)

    def tensors() -> Iterator[torch.Tensor]:
        alive = reference()  # its results may outlive it, and be computed again
        return iter(()) if alive is None else weights_of(alive)

    return Root(type(module).__name__, tensors)


def weights_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield a module's weights and buffers in the order of its image; tied ones repeatedly."""
    for part in module.modules():
        yield from (value for value in part._parameters.values() if value is not None)  # noqa: SLF001 - parameters() drops tied ones slowly
        yield from (value for value in part._buffers.values() if value is not None)  # noqa: SLF001 - see above


def root_of_inputs(values: Iterable[Any]) -> Root:
    """Return the root for a graph outside any module: the parameters among its inputs.

    If there are none, a number stands for them: workers run programs beside some model's weights.
    """
    references = [weakref.ref(value) for value in values if isinstance(value, torch.nn.Parameter)]
    number = [] if references else [become_cuda(torch.zeros(1))]

    def tensors() -> Iterator[torch.Tensor]:
        yield from number
        yield from (
            value for value in (reference() for reference in references) if value is not None
        )

    return Root("a compiled function", tensors)


class RootCall(NamedTuple):
    """A call of a root module."""

    root: Root
    module: torch.nn.Module
    args: Any
    kwargs: Any

    def run(self, function: Callable[..., Any]) -> Any:
        return function(self.module, *self.args, **self.kwargs)

    def run_locally(self, native: Callable[..., Any], reason: str) -> Any:
        """Run the module without graphs on the function's own processor, and count the call."""
        report.local_call(reason, 0, self.root.name)
        with request_context.timed_locally(reason):
            return self.run(native)


class _ThreadState(threading.local):
    """What a thread is doing."""

    root: Root | None = None  # that it is calling
    owner: Root | None = None  # whose parts it calls as roots
    graph_ran = False  # since its call of what Dynamo compiled began
    abandon = False  # whether it only traces
    moves = False  # whether it moves a module and its parts


class Roots:
    """Tracks for each thread the root being called, and gives the roots' calls their leases."""

    def __init__(self, address: str | None, credential: str | None) -> None:
        self.has_manager = address is not None  # whether the environment names one
        self._manager = address or "", credential or ""
        self.leases = ProcessLeases(Nodes(*self._manager))
        self.repeated_root = Root("a checkpointed region", tuple)  # what a backward pass repeats
        self.local = _ThreadState()

    def run(self, call: RootCall, function: Callable[..., Any]) -> tuple[Any, bool]:
        """Call a function that Dynamo compiled; return its answer, and whether a graph ran."""
        self.local.graph_ran = False
        answer = call.run(function)
        return answer, self.local.graph_ran

    def note_graph(self) -> None:
        """Note that a graph is about to run in this thread; raise Abandoned if it only traces."""
        if self.local.abandon:
            raise Abandoned
        self.local.graph_ran = True

    def parts_are_roots(self) -> AbstractContextManager[None]:
        """Capture the submodules of the module being called, which itself cannot be captured."""
        return assigned(self.local, root=None, owner=self.local.root)

    def repeated(self) -> AbstractContextManager[None]:
        """Capture nothing of what a backward pass is going to repeat, or repeats."""
        return assigned(self.local, root=self.repeated_root)

    def tracing(self, root: Root) -> AbstractContextManager[None]:
        """Mark this thread as tracing a call of `root`, without running graphs."""
        return assigned(self.local, root=root, abandon=True)

    def prepare(self, root: Root) -> None:
        """Bring a model to the node and onto a GPU before its first graph call.

        If the request that caused this has been answered, take no lease for it.
        """
        if not self.has_manager:
            return
        with contextlib.suppress(NoWeights):
            if request_context.served() and request_context.current() is None:
                root.bring(self.leases.nodes.own)
            else:
                self.leases.lease_for(1, root.bring)

    def close_sessions(self) -> None:
        """End all sessions and their leases; the next call opens new ones."""
        absent_bytes.bring_all()
        former, self.leases = self.leases, ProcessLeases(Nodes(*self._manager))
        former.nodes.close()

    def after_fork(self) -> None:
        """Reset sessions and leases in a forked child; the parent keeps its own."""
        for session in self.leases.nodes.sessions():
            session.close_copies()
        self.leases = ProcessLeases(Nodes(*self._manager))
        vars(self.local).clear()  # the thread that forked is inside no root's call here


# A model's call and the tracing thread both need the interpreter's lock, which goes from one to the
# other at every operator. The tracing thread asks at each of its steps whether to pause. It goes on
# when no call is under way, when those under way wait for something (a worker, or what this thread
# holds), and in any case for a share of the time.

# Of the time in which calls are under way without a gap, the tracing thread runs a tenth.
RUN_S = 0.004
PAUSE_S = 0.036
_LOOK_S = 0.004  # between two looks at what the callers do
_RUNNING = "RD"  # the states of a thread that has work: running or ready, and at the disk


class Pauses:
    """The threads inside a model's call, and the tracing thread that makes way for them."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        is_running: "Callable[[int], bool] | None" = None,
    ) -> None:
        self._clock = clock
        self._is_running = is_running or _is_running
        self._none_left = threading.Condition()
        self._callers: dict[int, int] = {}  # by the system's number of a thread, how deep it is
        self._thread: int | None = None  # that traces, if one does
        self._runs_until_s = 0.0
        self._due_s = 0.0  # when the tracing thread runs again, whatever the others do

    def begin_call(self) -> None:
        number = threading.get_native_id()
        self._callers[number] = self._callers.get(number, 0) + 1  # its own entry: without a lock

    def end_call(self) -> None:
        number = threading.get_native_id()
        depth = self._callers.pop(number, 1) - 1
        if depth:
            self._callers[number] = depth
        if self._thread is not None and not self._callers:
            with self._none_left:
                self._none_left.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Let this thread pause at its steps inside the `with` block."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def step(self) -> None:
        """Pause if this is the tracing thread, and others shall run now."""
        if not self._callers or self._thread != threading.get_ident():
            return
        if self._clock() >= self._runs_until_s and self._wait():
            self._runs_until_s = self._clock() + RUN_S
            self._due_s = self._runs_until_s + PAUSE_S

    def _wait(self) -> bool:
        """Wait while callers have work; return whether to run beside those that are left."""
        idle_looks = 0
        while self._clock() < self._due_s and idle_looks < 2:  # noqa: PLR2004 - one may be chance
            with self._none_left:
                if self._none_left.wait_for(lambda: not self._callers, _LOOK_S):
                    return False
            running = any(map(self._is_running, list(self._callers)))
            idle_looks = 0 if running else idle_looks + 1
        return True

    def after_fork(self) -> None:
        """Forget calls and threads of the parent, of which a forked child has none."""
        self._none_left = threading.Condition()
        self._callers = {}
        self._thread = None


def _is_running(number: int) -> bool:
    """Whether a thread of this process has work, and does not wait for something."""
    try:
        with open(f"/proc/self/task/{number}/stat", "rb") as file:  # noqa: PTH123 - at every look
            found = file.read()
    except OSError:  # it has ended
        return False
    return found.rpartition(b")")[2].split()[0].decode() in _RUNNING


pauses = Pauses()
