"""The root modules whose calls are captured: which one is being called, and its model."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torch_shim.background import Abandoned
from torch_shim.client import Session
from torch_shim.image_memory import ImageMemories
from torch_shim.weights import Model, Weights


class Root:
    """Weights that are called together: those of a module that user code calls by itself, or loose
    ones of a function that it compiled."""

    def __init__(self, name: str, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.name = name
        self.tensors = tensors
        self.lock = threading.Lock()
        self.model: Model | None = None
        self.session_name = ""
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

    def __init__(self, address: str | None, credential: str | None) -> None:
        self._address = address
        self._credential = credential or ""
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._memories = ImageMemories()
        self._weights = Weights(self._memories)
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
        """Bring a model to the node and onto a GPU ahead of its first graph call."""
        ready = self.ready(root)
        if not isinstance(ready, str):
            session, model = ready
            session.lease(model.digest, 1)

    def ready(self, root: Root) -> tuple[Session, Model] | str:
        """The session and the model for a graph call, or why there is none."""
        if self._address is None:
            return "no GPU manager was named (GPUFAAS_ADDRESS)"
        session = self.session()
        model = root.model
        if model is None or root.session_name != session.name:
            with root.lock:
                model = self._build(root, session)
        return (session, model) if model is not None else "no weights on the GPU"

    def session(self) -> Session:
        """This process's session with the GPU manager."""
        with self._lock:
            if self._session is None:
                assert self._address is not None
                self._session = Session(self._address, self._credential)
            return self._session

    def after_fork(self) -> None:
        """A child shares nothing with its parent's session."""
        if self._session is not None:
            self._session.close_copies()
        self._session = None
        self._lock = threading.Lock()
        self._weights = Weights(self._memories)
        self.local = threading.local()

    def _build(self, root: Root, session: Session) -> Model | None:
        if root.model is None or root.session_name != session.name:
            root.model = self._weights.build(root.tensors(), session)
            root.session_name = session.name
        return root.model
