"""The entry point: `python /path/to/runtime` serves the handler that the environment names.

This folder may lie anywhere, under any name: its modules become `gateway_ext.runtime`, and no other
module of the project becomes importable with them.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).absolute().parent
_PACKAGE = "gateway_ext"


def _make_importable() -> None:
    if sys.path and Path(sys.path[0] or ".").absolute() == _HERE:
        del sys.path[0]
    outer = ModuleType(_PACKAGE)
    outer.__path__ = []
    spec = importlib.util.spec_from_file_location(
        f"{_PACKAGE}.runtime", _HERE / "__init__.py", submodule_search_locations=[str(_HERE)]
    )
    if spec is None or spec.loader is None:
        sys.exit(f"{_HERE} is not a runtime")
    inner = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = outer
    sys.modules[spec.name] = inner
    spec.loader.exec_module(inner)


if __name__ == "__main__":
    _make_importable()
    life = importlib.import_module(f"{_PACKAGE}.runtime.process_life")
    code = life.main(os.environ, [sys.executable, *sys.orig_argv[1:]])
    importlib.import_module(f"{_PACKAGE}.runtime.template.forks").end_process(code)
