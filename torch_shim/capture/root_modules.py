"""The root modules whose calls are captured: the one that a thread is calling, and its model."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_shim.capture.traces.background import Abandoned
from torch_shim.errors import NoWeights
from torch_shim.leases import request_context
from torch_shim.leases.leasing import ProcessLeases, SessionLease
from torch_shim.leases.managers import Nodes
from torch_shim.patching import assigned
from torch_shim.process_report import report
from torch_shim.tensors import absent_bytes
from torch_shim.tensors.handles import become_cuda
from torch_shim.weights import ModelImage, ProcessWeights
from torch_shim.wire.manager_session import ManagerSession


class Root:
    """Weights that are used together: those of a module that user code calls directly, or the
    parameters among the inputs of a function that user code compiled."""

    def __init__(self, name: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.name = name
        self.tensors = tensors
        self.lock = threading.Lock()
        self.model: ModelImage | None = None
        self.owner = self  # the root whose model contains these weights
        self.traced = False  # whether a call of it was traced


def root_of_module(module: torch.nn.Module) -> Root:
    """The root does not keep the module alive."""
    reference = weakref.ref(module)

    def tensors() -> Iterator[torch.Tensor]:
        alive = reference()
        assert alive is not None, "a module that is being called is alive"
        return weights_of(alive)

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
        self._address = address
        self._credential = credential or ""
        self._leases: ProcessLeases | None = None
        self._lock = threading.Lock()
        self._weights = ProcessWeights()
        self.repeated_root = Root("a checkpointed region", tuple)  # what a backward pass repeats
        self.local = _ThreadState()

    def nodes(self) -> Nodes:
        return self._process_leases().nodes

    def lay_out_weights(self, module: torch.nn.Module, since: int) -> None:
        """Lay out weights for the node that were moved to the GPU after the mark `since`."""
        if self._address is not None:
            self._weights.lay_out_weights(weights_of(module), since)

    @property
    def current(self) -> Root | None:
        return self.local.root

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
        if self._address is None:
            return
        with contextlib.suppress(NoWeights):
            if request_context.served() and request_context.current() is None:
                _bring(root, self._weights, self.nodes().own)
            else:
                self.lease_source(root)(1)

    @property
    def has_manager(self) -> bool:
        """Whether the environment names a GPU manager."""
        return self._address is not None

    def lease_source(self, root: Root) -> Callable[[int], SessionLease]:
        """Return a function from a batch size to a lease for one call of `root`.

        That function raises NoWeights if `root` has no weights on the GPU.
        """
        bring = partial(_bring, root, self._weights)
        return partial(self._process_leases().lease_for, bring=bring)

    def forget(self, root: Root) -> None:
        """Forget the model of `root`, which its node no longer has; the next call resends it."""
        with root.lock:
            model, root.model = root.model, None
        if model is not None:
            self.nodes().forget_image(model.digest)

    def close_sessions(self) -> None:
        """End all sessions and their leases; the next call opens new ones."""
        absent_bytes.bring_all()
        with self._lock:
            leases, self._leases = self._leases, None
        if leases is not None:
            leases.nodes.close()

    def after_fork(self) -> None:
        """Reset sessions, leases and weights in a forked child; the parent keeps its own."""
        if self._leases is not None:
            self._leases.nodes.close_copies()
        self._leases = None
        self._lock = threading.Lock()
        self._weights.after_fork()
        vars(self.local).clear()  # the thread that forked is inside no root's call here

    def _process_leases(self) -> ProcessLeases:
        """Return this process's leases, with its sessions; created at the first call."""
        leases = self._leases
        if leases is None:
            with self._lock:
                leases = self._leases
                if leases is None:
                    assert self._address is not None, "only where there is a manager"
                    leases = self._leases = ProcessLeases(Nodes(self._address, self._credential))
        return leases


def _bring(root: Root, weights: ProcessWeights, session: ManagerSession) -> ModelImage:
    model = root.model
    if model is None or model.digest not in session.images:
        with root.lock:
            model = root.model
            if model is None or model.digest not in session.images:
                model = root.model = weights.build(root.tensors(), session, model)
    if model is None:
        raise NoWeights
    return model
