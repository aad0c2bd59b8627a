"""Distributes tests over xdist's workers: what shares an engine stays together, long groups first.

Unit tests compute; most other tests wait for processes of theirs. As many workers as there are
cores take groups that compute first, the others take groups that wait first, so that the cores
always have something to compute.
"""

import os
from typing import NamedTuple

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_COMPUTING = (
    "bench/tests/",
    "tests/architecture/",
    "tests/compat/",
    "tests/integration/test_both_cores",
    "tests/seeds/",
    "tests/unit/",
)
_SECONDS = 5.0  # of a module that is not named below


class _Known(NamedTuple):
    prefix: str  # of the tests' node ids
    group: str
    seconds: float  # in a whole run on two busy cores, to the nearest ten


# Tests of one group share a stack, a cluster or an engine, which takes long to start, or are long:
# what is not named here is taken for short, and may run last, alone. The first prefix counts.
_KNOWN = (
    _Known("bench/tests/test_gpu_benches", "gpu_benches", 120),
    _Known("tests/compat/test_compat", "compat", 320),
    _Known("tests/e2e/compose/", "compose", 560),
    # The same Engine has built what they need.
    _Known("tests/e2e/kubernetes/", "compose", 180),
    _Known("tests/e2e/page/", "page", 180),
    _Known("tests/e2e/test_traces", "traces", 30),
    _Known("tests/e2e/", "up", 620),
    _Known("tests/integration/cluster/", "cluster", 90),
    _Known("tests/integration/docker/", "docker", 70),
    _Known("tests/integration/etcd/test_guarded", "guarded", 60),
    _Known("tests/integration/etcd/test_leadership", "leadership", 50),
    _Known("tests/integration/etcd/test_store_faults", "store_faults", 30),
    _Known("tests/integration/executed/", "executed", 500),
    _Known("tests/integration/gateway/test_jetstream_emptied", "jetstream_emptied", 110),
    _Known("tests/integration/gateway/test_jetstream_queue", "jetstream_queue", 20),
    _Known("tests/integration/gateway/test_jobs_survive", "jobs_survive", 30),
    _Known("tests/integration/gateway/test_process_functions", "process_functions", 20),
    _Known("tests/integration/monitoring/", "monitoring", 80),
    _Known("tests/integration/test_both_cores", "both_cores", 100),
    _Known("tests/integration/test_check", "check", 50),
    _Known("tests/integration/test_early_return", "early_return", 100),
    _Known("tests/integration/test_exec", "exec", 30),
    _Known("tests/integration/test_changed_while_traced", "changed_while_traced", 90),
    _Known("tests/integration/test_emulated_paths", "emulated_paths", 130),
    _Known("tests/integration/test_passed_data", "passed_data", 200),
    _Known("tests/integration/test_two_nodes", "two_nodes", 100),
    _Known("tests/integration/test_node", "node", 130),
    _Known("tests/seeds/test_seeds", "seeds", 60),
    _Known("tests/unit/gateway_ext/runtime/test_serving", "serving", 40),
    _Known("tests/unit/gateway_ext/providers/process/test_hostile", "hostile_builds", 100),
    _Known("tests/unit/gpu_manager/worker/device/pool/test_memory_pool", "memory_pool", 140),
    _Known("tests/unit/gpufaas/commands/test_reproduce", "reproduce", 110),
    _Known("tests/unit/scheduler/core/test_invariants", "invariants", 40),
    _Known("tests/unit/scheduler/policies/test_policies_against", "oracle", 160),
    _Known("tests/unit/scheduler/sim/replay/", "replay", 160),
    _Known("tests/unit/torch_shim/", "shim", 550),
)


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """One unit of work a group; a worker takes the longest group of its kind that is left."""

    def _split_scope(self, nodeid: str) -> str:
        known = _known(nodeid)
        return nodeid.partition("::")[0] if known is None else known.group

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(self._next_for(node), last=False)
        super()._assign_work_unit(node)

    def _next_for(self, node: WorkerController) -> str:
        number = int(node.gateway.id.removeprefix("gw"))
        computing = number < (os.cpu_count() or 1)

        def rank(scope: str) -> tuple[bool, float]:
            first = next(iter(self.workqueue[scope]))
            known = _known(first)
            seconds = _SECONDS if known is None else known.seconds
            return first.startswith(_COMPUTING) == computing, seconds

        found: str = max(self.workqueue, key=rank)
        return found


def _known(nodeid: str) -> _Known | None:
    return next((one for one in _KNOWN if nodeid.startswith(one.prefix)), None)
