"""The datastore is killed, or frozen, under load: the schedulers serve on from memory."""

import struct
from typing import Any

import pytest

from scheduler.store.stored_records import LRU, MODELS, key, name
from tests.kit.engines.real_etcd import LOG, needs_etcd
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.processes.live_callers import calling, check, holding
from tests.kit.processes.live_cluster import LiveCluster, freeze, thaw
from tests.kit.waiting import eventually, wait_until
from tests.kit.worlds.joined_manager import model_of

pytestmark = [pytest.mark.etcd, needs_etcd]

# Noticing takes a write of the heartbeat that is not answered: 3 s on a machine that is not busy.
_NOTICED_S = 60.0


async def test_callers_are_served_and_all_is_written_later_when_etcd_is_killed(
    cluster: LiveCluster, images: list[SealedWeights]
) -> None:
    leader = cluster.leader()
    with calling(cluster, images) as callers:
        cluster.etcd.kill()
        lost_s = wait_until(
            lambda: _store(cluster, leader) == "lost",
            "the datastore counts as lost",
            within_s=_NOTICED_S,
        )
        used = await _meanwhile(cluster, 3.0)
        callers.more(60)
        cluster.etcd.start()
        back_s = wait_until(lambda: _store(cluster, leader) == "ok", "the datastore is back")
        callers.more(30)
        await _written(cluster, *used)
    LOG.info("etcd missed after %.1f s, back after %.1f s", lost_s, back_s)
    LOG.info("%d served, the longest wait %.1f s", callers.begun, callers.longest_wait_s())
    check(cluster, callers)


async def test_callers_are_served_and_all_is_written_later_when_etcd_is_frozen(
    cluster: LiveCluster, images: list[SealedWeights]
) -> None:
    leader = cluster.leader()
    with calling(cluster, images) as callers:
        freeze(cluster.etcd)
        try:
            lost_s = wait_until(
                lambda: _store(cluster, leader) == "lost",
                "the datastore counts as lost",
                within_s=_NOTICED_S,
            )
            used = await _meanwhile(cluster, 4.0)
            callers.more(60)
        finally:
            thaw(cluster.etcd)
        back_s = wait_until(lambda: _store(cluster, leader) == "ok", "the datastore is back")
        callers.more(30)
        await _written(cluster, *used)
    LOG.info("etcd missed after %.1f s, back after %.1f s", lost_s, back_s)
    LOG.info("%d served, the longest wait %.1f s", callers.begun, callers.longest_wait_s())
    check(cluster, callers)
    assert cluster.leader() == leader


def _store(cluster: LiveCluster, scheduler: str) -> Any:
    return cluster.shown(scheduler).get("store")


async def _meanwhile(cluster: LiveCluster, first: float) -> tuple[str, str]:
    """A model that nobody knew before is used; its name, and the node."""
    image = weights(struct.pack("4f", *[first] * 4) + bytes(4096))
    cluster.bring(image)
    async with holding(cluster, image) as given:
        return model_of(image), given.placement.node


async def _written(cluster: LiveCluster, model: str, node: str) -> None:
    """Wait until etcd has the profile of the model, and of every GPU what is on it."""

    def there() -> bool:
        stored = cluster.stored(LRU)
        orders = {name(LRU, gpu).partition("/")[0]: order for gpu, order in stored.items()}
        found = {node: {each["model"] for each in orders[node]["models"]} for node in orders}
        return found == {node: cluster.residents(node) for node in cluster.nodes}

    await eventually(there, "etcd has what every node has")
    await eventually(lambda: key(MODELS, model) in cluster.stored(MODELS), "etcd has its profile")
    assert model in cluster.residents(node)
