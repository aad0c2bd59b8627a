"""Which modules are compiled together, and which others the result relies on."""

import ast
from collections.abc import Iterator

from common.compiled_modules import ROOT

# What a placement runs through. Modules of structs, named tuples and enums stay as they are: mypyc
# makes ordinary Python classes of them.
_PATTERNS = (
    "cache_manager/eviction/*.py",
    "cache_manager/model/request_rates.py",
    "cache_manager/residency.py",
    "research/grounds/runs_at_once.py",
    "research/thesis/latency_bound.py",
    "scheduler/cluster/*.py",
    "scheduler/core/*.py",
    "scheduler/model/profiles.py",
    "scheduler/features/*.py",
    "scheduler/features/billing/*.py",
    "scheduler/features/tenants/*.py",
    "scheduler/policies/*.py",
    "scheduler/sim/engine.py",
    "scheduler/sim/simulation_tally.py",
)
# Rooms' own files look into their folders; what a meter collects, now and then, is named tuples;
# what features add to the service does input and output.
_LEFT_OUT = frozenset({
    *("__init__.py", "use_buckets.py", "hooks.py", "bill.py", "quotas.py"),
})  # fmt: skip


def sources() -> list[str]:
    """The modules that are compiled together, as paths below the root."""
    found = (path for pattern in _PATTERNS for path in ROOT.glob(pattern))
    return sorted(str(path.relative_to(ROOT)) for path in found if path.name not in _LEFT_OUT)


def relied_on() -> list[str]:
    """The sources and every module of ours that they import, directly or not: their types count."""
    known = set(sources())
    fresh = sorted(known)
    while fresh:
        imported = {path for source in fresh for path in _imported(source)}
        fresh = sorted(imported - known)
        known |= imported
    return sorted(known)


def _imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            path = name.replace(".", "/")
            for candidate in (f"{path}.py", f"{path}/__init__.py"):
                if (ROOT / candidate).is_file():
                    yield candidate
