"""Fixtures that all tests of a folder share, and that end with the folder.

A session's fixtures live until their worker ends: a stack went on for a quarter of an hour beside
tests that had nothing to do with it. A package's do so, too, where folders have no `__init__.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_KEPT = pytest.StashKey[dict[str, Any]]()


def of_folder(
    request: pytest.FixtureRequest, folder: Path, make: Callable[[], AbstractContextManager[T]]
) -> T:
    """The value of a module's fixture: made by the folder's first test, ended after its last one.

    The last one is that after which this worker runs a test of another folder, or none.
    """
    (node,) = [each for each in request.node.iter_parents() if _is(each, folder)]
    kept = node.stash.setdefault(_KEPT, {})
    name = str(request.fixturename)
    if name not in kept:
        context = make()
        kept[name] = context.__enter__()

        def end() -> None:
            del kept[name]
            context.__exit__(None, None, None)

        node.addfinalizer(end)
    found: T = kept[name]
    return found


def _is(node: pytest.Item | pytest.Collector, folder: Path) -> bool:
    return isinstance(node, pytest.Dir) and node.path == folder
