"""Distributes tests over xdist's workers: what shares an engine stays together, long groups first.

A module is a group, unless it says which one it is of, or its folder's conftest.py says it for all:

    pytestmark = pytest.mark.group("store_faults", seconds=30)

`seconds` is what the whole group takes in a run on two busy cores. As many workers as there are
cores take groups that compute first, the others take groups that wait for processes first, so that
the cores always have something to compute.
"""

import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# All other tests compute.
_WAITING = ("tests/e2e/", "tests/integration/", "tests/processes/", "tests/real/")
_SECONDS = 5.0  # of a group that says nothing
# xdist's main process knows tests by their ids alone: it reads the mark where it is written.
_MARK = re.compile(r"\bpytest\.mark\.group\(\"(\w+)\", seconds=([\d.]+)\)")


class _Group(NamedTuple):
    name: str
    seconds: float


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """One unit of work a group; a worker takes the longest group of its kind that is left."""

    def _split_scope(self, nodeid: str) -> str:
        return _group_of(nodeid.partition("::")[0]).name

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(self._next_for(node), last=False)
        super()._assign_work_unit(node)

    def _next_for(self, node: WorkerController) -> str:
        number = int(node.gateway.id.removeprefix("gw"))
        computing = number < (os.cpu_count() or 1)

        def rank(scope: str) -> tuple[bool, float]:
            module = next(iter(self.workqueue[scope])).partition("::")[0]
            return module.startswith(_WAITING) != computing, _group_of(module).seconds

        found: str = max(self.workqueue, key=rank)
        return found


@functools.cache
def _group_of(module: str) -> _Group:
    path = Path(module)
    for place in (path, *(folder / "conftest.py" for folder in path.parents)):
        mark = _MARK.search(place.read_text(encoding="utf-8")) if place.is_file() else None
        if mark is not None:
            return _Group(mark[1], float(mark[2]))
    return _Group(module, _SECONDS)
