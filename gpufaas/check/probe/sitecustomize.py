"""Notes, in a process under the shim, what its stats do not tell: lines of the user's own.

`gpufaas check` puts this folder on the path behind the shim's own; it does nothing elsewhere.
"""

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import util
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
_START = "torch_shim.start"
_NOT_THEIRS = ("/torch_shim/", "/site-packages/torch/", "/importlib/", "<")

Place = tuple[str, int]


class _Notes:
    """Sums of this process, by the line of the program that it is about."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._inside = threading.local()
        self.clear()
        os.register_at_fork(after_in_child=self.clear)
        atexit.register(self.write)
        # A child of multiprocessing leaves without atexit.
        util.register_after_fork(self, lambda it: util.Finalize(None, it.write, exitpriority=0))

    def clear(self) -> None:
        """Start from nothing, as a forked child does."""
        self._lock = threading.Lock()
        self.operators: dict[tuple[str, int, str], list[float]] = {}
        self.local: dict[tuple[str, int, str], list[int]] = {}
        self.refused: dict[tuple[str, int, str, str], int] = {}

    def operator(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """`__torch_function__` with its time taken, as long as it runs outside of any other."""

        def run(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(self._inside, "it", False):
                return native(cls, func, types, args, kwargs)
            self._inside.it = True
            start_s = time.perf_counter()
            try:
                return native(cls, func, types, args, kwargs)
            finally:
                took_s = time.perf_counter() - start_s
                self._inside.it = False
                key = (*_place(), getattr(func, "__name__", str(func)))
                with self._lock:
                    sums = self.operators.setdefault(key, [0, 0.0, took_s])
                    sums[0] += 1
                    sums[1] += took_s
                    sums[2] = min(sums[2], took_s)

        return run

    def local_call(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """`Report.local_call` with its line."""

        def local_call(report: Any, reason: str, operators: int, *rest: Any) -> Any:
            with self._lock:
                sums = self.local.setdefault((*_place(), reason), [0, 0])
                sums[0] += 1
                sums[1] += operators
            return native(report, reason, operators, *rest)

        return local_call

    def refusal(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """`Unsupported.__init__` with its line: the program may catch the error."""

        def init(error: Any, call: str, remedy: str) -> None:
            with self._lock:
                key = (*_place(), call, remedy)
                self.refused[key] = self.refused.get(key, 0) + 1
            native(error, call, remedy)

        return init

    def write(self) -> None:
        """Append a line to a file that other processes append to as well."""
        notes = {
            "operators": [[*key, *sums] for key, sums in self.operators.items()],
            "local": [[*key, *sums] for key, sums in self.local.items()],
            "refused": [list(key) for key in self.refused],
        }
        if any(notes.values()):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, (json.dumps(notes) + "\n").encode())
            finally:
                os.close(descriptor)


def _place() -> Place:
    """The innermost line that is neither the shim's nor PyTorch's."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - there is no other way to it
    outermost = frame
    while frame is not None:
        outermost = frame
        file = frame.f_code.co_filename
        if file != __file__ and not any(part in file for part in _NOT_THEIRS):
            return file, frame.f_lineno
        frame = frame.f_back
    assert outermost is not None
    return outermost.f_code.co_filename, outermost.f_lineno


def _install(path: str) -> None:
    errors = importlib.import_module("torch_shim.errors")
    report = importlib.import_module("torch_shim.report")
    tensors = importlib.import_module("torch_shim.tensors")
    notes = _Notes(path)
    native = tensors.CudaTensor.__torch_function__.__func__
    tensors.CudaTensor.__torch_function__ = classmethod(notes.operator(native))
    report.Report.local_call = notes.local_call(report.Report.local_call)
    errors.Unsupported.__init__ = notes.refusal(errors.Unsupported.__init__)


class _Finder(importlib.abc.MetaPathFinder):
    """Has the shim's start install the notes when it has run."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the one module of interest."""
        if fullname != _START:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _install_after(spec.loader, self._path)
        return spec


def _install_after(loader: importlib.abc.Loader, path: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        start = module.after_import

        def after_import() -> None:
            start()
            _install(path)

        vars(module)["after_import"] = after_import

    vars(loader)["exec_module"] = exec_module


def _run_shadowed() -> None:
    """Runs the sitecustomize that would have run without ours."""
    entries = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    later = entries[_behind_the_shim(entries) :]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", later)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _behind_the_shim(entries: list[str]) -> int:
    shim = [number for number, entry in enumerate(entries) if "torch_shim" in Path(entry).parts]
    return max(shim, default=-1) + 1


_path = os.environ.get("GPUFAAS_CHECK")  # noqa: TID251 - an entry point
if _path:
    sys.meta_path.insert(0, _Finder(_path))
_run_shadowed()
