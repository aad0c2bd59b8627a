"""A node is cut off from the schedulers, or ended by a signal, under load."""

import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB
from tests.kit.engines.real_etcd import LOG, needs_etcd
from tests.kit.nodes.manager_client import SealedWeights
from tests.kit.nodes.worker_client import needs
from tests.kit.processes.live_callers import calling, check, holding
from tests.kit.processes.live_cluster import NODES, SCHEDULERS, LiveCluster
from tests.kit.waiting import wait_until
from tests.kit.worlds.worker_machine import children_of

pytestmark = [pytest.mark.etcd, needs_etcd]

# A call that takes some tenths of a second, well below the grace of a node that ends; what its
# worker holds when it is on its way.
_LONG_MIB = 400
_BEGUN_MIB = 50

Call = Future[list[float]]


async def test_node_comes_back_with_all_that_it_has_when_it_was_given_up(
    cluster: LiveCluster, images: list[SealedWeights]
) -> None:
    leader = cluster.leader()
    with calling(cluster, images) as before:
        before.more(60)
    async with holding(cluster, images[0], on="n0") as held:
        cluster.net.cut("n0", *SCHEDULERS)
        cut_s = time.time()
        with calling(cluster, images) as callers:
            given_up_s = wait_until(
                lambda: cluster.shown(leader).get("gpus") == len(NODES) - 1, "one node is given up"
            )
            callers.more(60, elsewhere_than="n0")
            healed_s = time.time()
            cluster.net.heal()
            back_s = wait_until(
                lambda: cluster.shown(leader).get("gpus") == len(NODES), "all nodes are back"
            )
            # Nobody uses the lease, and others wait now.
            wait_until(lambda: held.placement.lease in cluster.journal().ended, "it has ended")
            callers.more(60)
    LOG.info("given up after %.1f s, attached %.1f s after healing", given_up_s, back_s)
    check(cluster, callers, parted=True)
    journal = cluster.journal()
    given = [each for each in journal.granted.values() if each.slot == held.placement.slot]
    ended_s = journal.ended[held.placement.lease].at_s
    assert [each for each in given if cut_s < each.at_s < ended_s] == []
    assert ended_s > healed_s, "the lease outlived the time without a scheduler"
    assert [each for each in given if each.at_s >= ended_s]


async def test_calls_in_flight_end_well_when_a_node_is_told_to_end(
    cluster: LiveCluster, images: list[SealedWeights]
) -> None:
    node = cluster.nodes["n1"]
    with calling(cluster, images) as callers:
        async with holding(cluster, images[0], on="n1") as held:
            with closing(cluster.function("n1")) as function, ThreadPoolExecutor(1) as beside:
                function.acquire(images[0], token=held.token)
                assert function.lease == held.placement.lease
                before_mib = _workers_mib(node.pid)
                call = _under_way(
                    lambda: beside.submit(function.call, images[0], needs(_LONG_MIB)),
                    lambda: _workers_mib(node.pid) > before_mib + _BEGUN_MIB,
                )
                node.tell(signal.SIGTERM)
                told_s = time.monotonic()
                assert call.result() == pytest.approx([2.0 * _LONG_MIB * MIB / 4] * 4, rel=1e-2)
        assert node.ended() == 0
        LOG.info("ended after %.1f s", time.monotonic() - told_s)
        wait_until(
            lambda: cluster.shown(cluster.leader()).get("gpus") == len(NODES) - 1,
            "one node is gone",
        )
        callers.more(60, elsewhere_than="n1")
    assert "Traceback" not in node.said()
    assert cluster.journal().ended[held.placement.lease].why == "the GPU manager stops"
    check(cluster, callers, told_to_end="n1", parted=True)


def _under_way(begin: Callable[[], Call], computes: Callable[[], bool]) -> Call:
    """A call that a worker computes now; one that ended before that was seen is followed by one."""
    call = begin()
    wait_until(lambda: computes() or call.done(), "a worker computes")
    if call.done():
        call.result()
        return _under_way(begin, computes)
    return call


def _workers_mib(manager: int) -> float:
    """What the worker processes of a node hold of their own."""
    workers = [each for server in children_of(manager) for each in children_of(server)]
    return sum(_anonymous_bytes(worker) for worker in workers) / MIB


def _anonymous_bytes(pid: int) -> int:
    """Nothing where the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return 0
