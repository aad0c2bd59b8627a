"""Installs notes.py in a process under the shim.

`gpufaas check` puts this folder on the path after the shim's; elsewhere it has no effect.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
_START = "torch_shim.start"


class _StartFinder(importlib.abc.MetaPathFinder):
    """Installs the notes once the shim's start has run."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the shim's start module, and None for others."""
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
            _notes().install(path)

        vars(module)["after_import"] = after_import

    vars(loader)["exec_module"] = exec_module


def _notes() -> Any:
    """The notes, as a module of the shim: its advice, tracebacks and Dynamo skip their frames."""
    importlib.import_module("torch_shim").__path__.append(str(_HERE))
    return importlib.import_module("torch_shim.notes")


def _run_shadowed() -> None:
    """Run the sitecustomize that this one shadows."""
    places = [Path(entry or ".").resolve() for entry in sys.path]
    behind = sys.path[places.index(_HERE) + 1 :]  # the shim's own precedes ours and has run
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_path = os.environ.get("GPUFAAS_CHECK")  # noqa: TID251 - an entry point
if _path:
    sys.meta_path.insert(0, _StartFinder(_path))
_run_shadowed()
