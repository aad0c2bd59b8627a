"""The root modules whose calls are captured: which one is being called, and its model."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from torch_shim.capture.background import Abandoned
from torch_shim.errors import NoWeights
from torch_shim.leases import request_context
from torch_shim.leases.leasing import ProcessLeases
from torch_shim.leases.managers import Nodes
from torch_shim.leases.presented_lease import Right
from torch_shim.weights.image_memory import ImageMemories
from torch_shim.weights.model_weights import ModelImage, ProcessWeights
from torch_shim.wire.manager_session import ManagerSession


class Root:
    """Weights that are called together: those of a module that user code calls by itself, or loose
    ones of a function that it compiled."""

    def __init__(self, name: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.name = name
        self.tensors = tensors
        self.lock = threading.Lock()
        self.model: ModelImage | None = None
        self.owner = self  # the root whose model has these weights


def root_of_module(module: torch.nn.Module) -> Root:
    """The root for a module; it does not keep the module alive."""
    found = weakref.ref(module)

    def tensors() -> Iterator[torch.Tensor]:
        alive = found()
        assert alive is not None, "a module that is being called is alive"
        return weights_of(alive)

    return Root(type(module).__name__, tensors)


def weights_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights and buffers under a module in the order of its image; tied ones come again."""
    for part in module.modules():
        yield from (value for value in part._parameters.values() if value is not None)  # noqa: SLF001 - parameters() drops tied ones slowly
        yield from (value for value in part._buffers.values() if value is not None)  # noqa: SLF001 - see above


def root_of_inputs(values: Iterable[Any]) -> Root:
    """The root for a graph outside of any module: the parameters among its inputs."""
    found = [weakref.ref(value) for value in values if isinstance(value, torch.nn.Parameter)]

    def tensors() -> Iterator[torch.Tensor]:
        return (value for value in (reference() for reference in found) if value is not None)

    return Root("a compiled function", tensors)


class Roots:
    """Knows, thread by thread, whose call is going on."""

    def __init__(
        self, address: str | None, credential: str | None, *, early_return: bool = True
    ) -> None:
        self._address = address
        self._credential = credential or ""
        self._early_return = early_return
        self._parts: tuple[Nodes, ProcessLeases] | None = None
        self._lock = threading.Lock()
        self._memories = ImageMemories()
        self._weights = ProcessWeights(self._memories)
        self.local = threading.local()

    def settle(self, module: torch.nn.Module, since: int) -> None:
        """Weights were moved to the GPU after the mark `since`: lay them out for the node."""
        if self._address is not None:
            self._memories.settle(weights_of(module), since)

    @property
    def current(self) -> Root | None:
        """The root that this thread is calling."""
        root: Root | None = getattr(self.local, "root", None)
        return root

    def graphs_run(self) -> int:
        """How many graphs this thread has answered by."""
        count: int = getattr(self.local, "graphs", 0)
        return count

    def about_to_run(self) -> None:
        """A graph is about to run in this thread: the tracing thread stops there."""
        if getattr(self.local, "abandon", False):
            raise Abandoned
        self.local.graphs = self.graphs_run() + 1

    @contextlib.contextmanager
    def parts_are_roots(self) -> Iterator[None]:
        """The module being called cannot be captured; its submodules can, over its weights."""
        owner = self.local.root
        self.local.root, self.local.owner = None, owner
        try:
            yield
        finally:
            self.local.root, self.local.owner = owner, None

    @contextlib.contextmanager
    def tracing(self, root: Root) -> Iterator[None]:
        """This thread traces a call of `root` and runs nothing."""
        self.local.root, self.local.abandon = root, True
        try:
            yield
        finally:
            self.local.root, self.local.abandon = None, False

    def prepare(self, root: Root) -> None:
        """Bring a model to the node and onto a GPU ahead of its first graph call.

        When the request that began this has been answered, its lease is for others.
        """
        if self._address is None:
            return
        with contextlib.suppress(NoWeights):
            if request_context.served() and request_context.current() is None:
                _bring(root, self._weights, self._nodes()[0].own)
            else:
                self.right(root)(1)

    @property
    def has_manager(self) -> bool:
        """Whether the environment names a GPU manager."""
        return self._address is not None

    def right(self, root: Root) -> Callable[[int], Right]:
        """What gives leases for calls of `root`; NoWeights where it has none on the GPU."""
        _, leasing = self._nodes()
        return partial(leasing.right, bring=partial(_bring, root, self._weights))

    def forget(self, root: Root) -> None:
        """A node does not have the model of `root` any more: it is brought anew."""
        with root.lock:
            model, root.model = root.model, None
        if model is not None:
            self._weights.forget(model)

    def after_fork(self) -> None:
        """A child shares nothing with its parent's sessions."""
        if self._parts is not None:
            self._parts[0].close_copies()
        self._parts = None
        self._lock = threading.Lock()
        self._weights = ProcessWeights(self._memories)
        self.local = threading.local()

    def _nodes(self) -> tuple[Nodes, ProcessLeases]:
        """This process's sessions, and the leases under them."""
        if self._parts is None:
            with self._lock:
                if self._parts is None:
                    assert self._address is not None, "only where there is a manager"
                    nodes = Nodes(self._address, self._credential)
                    self._parts = nodes, ProcessLeases(nodes, early_return=self._early_return)
        return self._parts


def _bring(root: Root, weights: ProcessWeights, session: ManagerSession) -> ModelImage:
    """The model of `root`, once the node of this session has it."""
    model = root.model
    if model is None or not model.is_at(session):
        with root.lock:
            model = root.model
            if model is None or not model.is_at(session):
                model = root.model = weights.build(root.tensors(), session, model)
    if model is None:
        raise NoWeights
    return model
