"""Finding the handler, and what is answered and logged when it raises.

Its folder becomes the package `function`, as in the python3 templates.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Generic, NamedTuple, TypeVar

from gateway_ext.runtime.handler_values import BadResponse, HandlerContext, HandlerEvent

_PACKAGE = "function"
Handle = Callable[[HandlerEvent, HandlerContext], object]
_HANDLE = "handle"
_MOST_SHOWN = 200  # characters of the parameters of a handler that is refused


class NoHandler(Exception):
    """The folder has no handler that could be called."""


_Other = TypeVar("_Other")


class HandlerKind(NamedTuple, Generic[_Other]):
    """Another kind of handlers than `handle(event, context)`."""

    name: str  # of the module's function, whose parameters are `first` and the context
    first: str
    is_asked: bool  # by the deployment
    make: Callable[[Callable[..., object]], _Other]


def load(folder: Path, kinds: Sequence[HandlerKind[_Other]] = ()) -> Handle | _Other:
    """Run handler.py once and return its `handle`, or its handler of another kind that is asked.

    Without a `handle`, one of another kind is returned in any case. The module may use
    `from .x import y`, `from function.x import y` or `import x` for its own files.
    """
    folder = folder.absolute()
    path = folder / "handler.py"
    if not path.is_file():
        raise NoHandler(f"{path.name} does not exist in the function's folder")
    sys.path.insert(0, str(folder))
    _package(folder)
    module = _run(f"{_PACKAGE}.handler", path)
    # `import handler` from one of its own files must not run it a second time.
    sys.modules.setdefault("handler", module)
    handle = getattr(module, _HANDLE, None)
    for kind in kinds:
        other = getattr(module, kind.name, None)
        if callable(other) and (kind.is_asked or not callable(handle)):
            _check_shape(other, kind.name, kind.first)
            return kind.make(other)
        if kind.is_asked:
            raise NoHandler(f"{path.name} has no function `{kind.name}`")
    if not callable(handle):
        raise NoHandler(f"{path.name} has no function `{_HANDLE}`")
    _check_shape(handle, _HANDLE, "event")
    found: Handle = handle
    return found


def runs_in_loop(handle: Handle) -> bool:
    """Whether a call of the handler only makes a coroutine or an async generator."""
    call = getattr(handle, "__call__", handle)  # noqa: B004 - an object's, not whether it has one
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_kind(function) for is_kind in kinds for function in (handle, call))


def _check_shape(handle: Callable[..., object], name: str, first: str) -> None:
    """NoHandler if no call of it could succeed; one whose signature is unknown may be called."""
    expected = f"{name}({first}, context) is expected"
    if inspect.isclass(handle):
        raise NoHandler(f"{name} is a class: a function {expected}")
    if hasattr(handle, "__signature__"):
        return  # a decorator's claim, perhaps of what it wraps
    try:
        signature = inspect.signature(handle, follow_wrapped=False)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        count = len(signature.parameters)
        takes = f"{count} argument{'' if count == 1 else 's'}"
        raise NoHandler(f"{name}{_names_in(signature)} takes {takes}: {expected}") from error


def _names_in(signature: inspect.Signature) -> str:
    """The parameters by name alone: texts of defaults and annotations are the author's code."""
    bare = [
        inspect.Parameter(parameter.name, parameter.kind)
        for parameter in signature.parameters.values()
    ]
    text = str(inspect.Signature(bare))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...)"


def _package(folder: Path) -> None:
    start = folder / "__init__.py"
    if start.is_file():
        _run(_PACKAGE, start, folders=[str(folder)])
        return
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package


def _run(name: str, path: Path, folders: list[str] | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise NoHandler(f"{path.name} is no module of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_FAILED = 500
_TRY_LATER = frozenset({429, 503})
_MOST_TEXT = 1000
_RUNTIME = f"{Path(__file__).absolute().parent}/"
_IMPORTS = "<frozen importlib"


class HandlerFailure(NamedTuple):
    """The status and the text of the answer, and the text of the log."""

    status: int
    why: str
    logged: str


def put_off_status(error: BaseException) -> int | None:
    """The status of an error that says that the call may come later; None of any other.

    `answer_status` is what the shim's errors carry: the runtime does not import the shim.
    """
    status = getattr(error, "answer_status", None)
    return status if status in _TRY_LATER else None


@dataclass(frozen=True, slots=True)
class HandlerErrors:
    """Describes errors of the handler in `folder`, from its author's line on.

    An error's text may hold what callers must not see: they get it only with `shows_text`.
    `log_command` shows the log to whoever may read it.
    """

    folder: str
    shows_text: bool = False
    log_command: str = ""

    def failure(self, error: BaseException, call_id: str = "") -> HandlerFailure:
        """An error of the handler is answered 500; one of the shim's may have it come later."""
        if status := put_off_status(error):
            return HandlerFailure(status, str(error), f"was put off: {error}")
        text = str(traceback.TracebackException.from_exception(error)).strip()
        if isinstance(error, BadResponse):
            what, logged = "the function returned what cannot be sent", f"failed: {text}"
        else:
            what = f"the function raised {type(error).__name__}"
            logged = f"raised\n{self.raised(error)}"
        shown = f": {text[:_MOST_TEXT]}" if self.shows_text and text else ""
        call = f", call {call_id}" if call_id else ""
        log = f"; its log: {self.log_command}{call}" if self.log_command else ""
        return HandlerFailure(_FAILED, f"{what}{shown}{log}", logged)

    def import_failure(self, error: BaseException) -> str:
        """The text of the log when the handler cannot be imported; its last line says why."""
        raised = traceback.TracebackException.from_exception(error)
        authors = [frame for frame in raised.stack if self._is_authors(frame.filename)]
        if isinstance(error, NoHandler):
            return f"its handler cannot be imported: {error}\n"
        why = " ".join(f"{type(error).__name__}: {raised}".split())[:_MOST_TEXT]
        if authors and not isinstance(error, SyntaxError):  # whose text names its place
            why += f" ({self._shown(authors[-1].filename)}, line {authors[-1].lineno})"
        return f"{self.raised(error)}\nits handler cannot be imported: {why}\n"

    def example_failure(self, error: Exception) -> str:
        """The text of the log when an example fails: its sentence, after what the author raised."""
        cause = error.__cause__
        frames = traceback.extract_tb(cause.__traceback__) if cause is not None else ()
        is_authors = any(self._is_authors(frame.filename) for frame in frames)
        before = f"{self.raised(cause)}\n" if cause is not None and is_authors else ""
        return f"{before}{error}\n"

    def raised(self, error: BaseException) -> str:
        """The traceback without the frames of those who called the handler, or wrapped torch."""
        raised = traceback.TracebackException.from_exception(error)
        hidden = (_RUNTIME, *_folders("torch_shim"))
        for link in _chain(raised):
            self._trim(link, hidden, _folders("torch"))
        return "".join(raised.format()).rstrip()

    def _trim(
        self, raised: traceback.TracebackException, hidden: tuple[str, ...], torch: tuple[str, ...]
    ) -> None:
        frames = list(raised.stack)
        first = next((n for n, f in enumerate(frames) if self._is_authors(f.filename)), 0)
        kept = [
            frame
            for number, frame in enumerate(frames)
            if number >= first
            and not frame.filename.startswith((_IMPORTS, *hidden))
            and (number == len(frames) - 1 or not frame.filename.startswith(torch))
        ]
        for frame in kept:
            frame.filename = self._shown(frame.filename)
        raised.stack = traceback.StackSummary.from_list(kept)
        if file := getattr(raised, "filename", None):  # of a SyntaxError
            raised.filename = self._shown(file)

    def _is_authors(self, file: str) -> bool:
        return file.startswith(f"{self.folder}/")

    def _shown(self, file: str) -> str:
        return file.removeprefix(f"{self.folder}/")


def _folders(package: str) -> tuple[str, ...]:
    return tuple(f"{folder}/" for folder in getattr(sys.modules.get(package), "__path__", ()))


def _chain(raised: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    waiting, seen = [raised], set()
    while waiting:
        error = waiting.pop()
        if id(error) not in seen:
            seen.add(id(error))
            yield error
            others = (error.__cause__, error.__context__, *(error.exceptions or ()))
            waiting += [other for other in others if other is not None]
