"""A plugin of pytest: the product runs as under `python -O`, while the tests' asserts stay.

`python -m pytest -p tests.kit.optimised_product`. Python itself would take the asserts of tests,
too, and would compile all libraries anew.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

PRODUCT = frozenset(
    {"cache_manager", "common", "gateway_ext", "gpu_manager", "gpufaas", "scheduler", "torch_shim"}
)


class _Optimised(SourceFileLoader):
    """Compiles a module without its asserts; no cached bytecode is read or written."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code = compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)
        assert isinstance(code, CodeType)
        return code


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in PRODUCT:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and found.origin is not None and found.origin.endswith(".py"):
            found.loader = _Optimised(fullname, found.origin)
        return found


early = [name for name in sys.modules if name.partition(".")[0] in PRODUCT]
if early:
    raise ImportError(f"{early[:3]} were imported with their asserts")
sys.meta_path.insert(0, _Finder())
