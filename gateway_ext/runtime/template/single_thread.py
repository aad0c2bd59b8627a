"""Keeps the numeric libraries of a template to one thread, and lets its forks have theirs.

A copy of a process lacks the threads of the pools that its parent has started, and waits for them
forever. So OpenMP, which torch uses, runs its parallel regions in the thread that comes to them;
the number of threads that torch shows, and that its traces depend on, stays what it is. OpenBLAS
starts a pool when it is loaded, can end it, and starts it again when it is needed.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from gateway_ext.runtime.template.random_states import note_torch_seed

_OPENBLAS = "openblas"
_OPENMP = ("libgomp", "libomp", "libiomp")


class SingleThread:
    """The thread pools of a template, which do not start, and of a fork, which may."""

    def __init__(self) -> None:
        """Create this before the handler is imported."""
        self._levels: list[tuple[ctypes.CDLL, int]] = []
        sys.meta_path.insert(0, _AfterImport("torch", self._torch_imported))

    def end_pools(self) -> None:
        """Have OpenBLAS end its threads, as it does by itself before a fork."""
        threads = sum(1 for _ in Path("/proc/self/task").iterdir())
        if threads > 1 and _loaded(_OPENBLAS):
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)

    def end(self) -> None:
        """Let this fork have as many threads as a process of its own."""
        for library, levels in self._levels:
            library.omp_set_max_active_levels(levels)

    def _torch_imported(self) -> None:
        note_torch_seed()
        for library in map(ctypes.CDLL, sorted(_loaded(*_OPENMP))):
            self._levels.append((library, library.omp_get_max_active_levels()))
            library.omp_set_max_active_levels(0)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a step once a module has been executed, whoever finds the module."""

    def __init__(self, name: str, step: Callable[[], None]) -> None:
        self._name = name
        self._step = step
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the next finder has for the module, with the step added."""
        if fullname != self._name or self._asking:
            return None
        self._asking = True  # another finder that asks all others must not come back here
        try:
            asked = (finder.find_spec(fullname, path, target) for finder in sys.meta_path[:])
            spec = next(filter(None, asked), None)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            self._add_step(spec.loader)
        return spec

    def _add_step(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            vars(loader).pop("exec_module", None)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._step()

        vars(loader)["exec_module"] = exec_module


def _loaded(*words: str) -> set[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    named = [line for line in lines if any(word in line.rpartition("/")[2] for word in words)]
    return {path for line in named if Path(path := line.split(maxsplit=5)[5]).is_file()}
