"""The root modules whose calls are captured: which one is being called, and its model."""

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch

from torch_shim.background import Abandoned
from torch_shim.client import Session
from torch_shim.weights import Model, Weights

MOST_IMAGES = 4


class Root:
    """One module that user code calls by itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.ref(module)
        self.name = type(module).__name__
        self.lock = threading.Lock()
        self.model: Model | None = None
        self.session_name = ""
        self.images = 0


class Roots:
    """Knows, thread by thread, whose call is going on."""

    def __init__(self, address: str | None, credential: str | None) -> None:
        self._address = address
        self._credential = credential or ""
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._weights = Weights()
        self.local = threading.local()

    @property
    def current(self) -> Root | None:
        """The root that this thread is calling."""
        root: Root | None = getattr(self.local, "root", None)
        return root

    def name(self) -> str:
        """What to call the module in a log."""
        root = self.current
        return root.name if root is not None else "a function"

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
    def tracing(self, root: Root) -> Iterator[None]:
        """This thread traces a call of `root` and runs nothing."""
        self.local.root, self.local.abandon = root, True
        try:
            yield
        finally:
            self.local.root, self.local.abandon = None, False

    def prepare(self, root: Root) -> None:
        """Bring a model to the node and onto a GPU ahead of its first graph call."""
        self.local.root = root
        try:
            ready = self.ready()
            if not isinstance(ready, str):
                session, model = ready
                session.lease(model.digest, 1)
        finally:
            self.local.root = None

    def ready(self) -> tuple[Session, Model] | str:
        """The session and the model of the call that is going on, or why there is none."""
        root = self.current
        if root is None:
            return "not within a call of a module"
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
        self._session = None
        self._lock = threading.Lock()
        self._weights = Weights()
        self.local = threading.local()

    def _build(self, root: Root, session: Session) -> Model | None:
        if root.model is None or root.session_name != session.name:
            module = root.module()
            assert module is not None, "a module that is being called is alive"
            root.model = self._weights.build(module, session)
            root.session_name = session.name
            root.images += 1
        return root.model


