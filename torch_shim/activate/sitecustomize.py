"""The import hook: with this folder on PYTHONPATH, importing torch installs the shim.

Before torch is imported, the hook reads only the environment. Unless GPUFAAS_ENABLED is 1, it does
nothing.
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent
_PACKAGE = "torch_shim"


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds the shim's package beside this file, and adds the patching step to torch's loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of `torch_shim` or `torch`; None for any other module."""
        if fullname == _PACKAGE:
            folder = _HERE.parent
            return importlib.util.spec_from_file_location(
                fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
        if fullname == "torch":
            return self._torch(path, target)
        return None

    def _torch(
        self, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec("torch", path, target)
            if spec is not None:
                # A caller may discard the spec: the hook stays until torch has been executed.
                if spec.loader is not None:
                    _patch_after(spec.loader)
                return spec
        return None


def _patch_after(loader: importlib.abc.Loader) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # Programs choose a card by it before they import torch; they have none but the shim's.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # noqa: TID251 - an entry point
        _name_user()
        collects = gc.isenabled()
        gc.disable()  # as collector_pause.py says, which this file cannot import yet
        try:
            execute(module)
            vars(loader).pop("exec_module", None)
            importlib.import_module(f"{_PACKAGE}.start").after_import()
        finally:
            if collects:
                gc.enable()

    vars(loader)["exec_module"] = exec_module


def _run_shadowed() -> None:
    """Run the sitecustomize that this module shadows, if there is one."""
    rest = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _keep_threads_passive() -> None:
    """Stop OpenMP threads from spinning between operators, which takes the worker's cores."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):  # noqa: TID251 - an entry point
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # noqa: TID251 - an entry point


def _name_user() -> None:
    """Give the user a name for torch 2.11's Dynamo, which fails without; functions' have none."""
    try:
        importlib.import_module("getpass").getuser()  # not at the start of every Python
    except (KeyError, OSError):  # the latter from Python 3.13 on
        os.environ["LOGNAME"] = str(os.getuid())  # noqa: TID251 - an entry point


if os.environ.get("GPUFAAS_ENABLED") == "1":  # noqa: TID251 - an entry point
    _keep_threads_passive()
    sys.meta_path.insert(0, _TorchFinder())
_run_shadowed()
