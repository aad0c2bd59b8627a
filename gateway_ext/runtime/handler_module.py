"""Finding the handler: the folder becomes the package `function`, as in the python3 templates."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from gateway_ext.runtime.handler_event import HandlerContext, HandlerEvent

_PACKAGE = "function"
Handle = Callable[[HandlerEvent, HandlerContext], object]
HandleList = Callable[[list[HandlerEvent], HandlerContext], object]
_HANDLE, _HANDLE_LIST = "handle", "handle_batch"
_MOST_SHOWN = 200  # characters of the parameters of a handler that is refused


class NoHandler(Exception):
    """The folder has no handler that could be called."""


class ListHandler(NamedTuple):
    """A handler that takes a list of calls, and returns a list of answers."""

    handle: HandleList


Handler = Handle | ListHandler


def load(folder: Path, *, takes_list: bool = False) -> Handler:
    """Run handler.py once and return its `handle`, or its `handle_batch` if it `takes_list`.

    Without a `handle`, a `handle_batch` is returned in any case. The module may use
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
    handle, of_list = getattr(module, _HANDLE, None), getattr(module, _HANDLE_LIST, None)
    if callable(of_list) and (takes_list or not callable(handle)):
        _check_shape(of_list, _HANDLE_LIST, "events")
        return ListHandler(of_list)
    if takes_list or not callable(handle):
        wanted = _HANDLE_LIST if takes_list else _HANDLE
        raise NoHandler(f"{path.name} has no function `{wanted}`")
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
