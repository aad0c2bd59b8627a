"""The datastore is killed, or frozen, under load: the schedulers serve on from memory."""

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

import pytest

from scheduler.service.records import LRU, MODELS, key, name
from tests.etcd_world import LOG, needs_etcd
from tests.joined import model_of
from tests.live_callers import calling, check, lease, release
from tests.live_cluster import LiveCluster, freeze, thaw
from tests.manager_client import Weights, weights

pytestmark = [pytest.mark.etcd, needs_etcd]

# Noticing takes a write of the heartbeat that is not answered.
_NOTICED_S = 15.0


def test_callers_are_served_and_all_is_written_later_when_etcd_is_killed(
    cluster: LiveCluster, images: list[Weights]
) -> None:
    leader = cluster.leader()
    with calling(cluster, images) as callers:
        cluster.etcd.kill()
        lost_s = cluster.until(lambda: _store(cluster, leader) == "lost", _NOTICED_S)
        used = _meanwhile(cluster, 3.0)
        callers.more(60)
        cluster.etcd.start()
        back_s = cluster.until(lambda: _store(cluster, leader) == "ok")
        callers.more(30)
        _written(cluster, *used)
    LOG.info("etcd missed after %.1f s, back after %.1f s", lost_s, back_s)
    LOG.info("%d served, the longest wait %.1f s", callers.begun, callers.longest_wait_s())
    check(cluster, callers)


def test_callers_are_served_and_all_is_written_later_when_etcd_is_frozen(
    cluster: LiveCluster, images: list[Weights]
) -> None:
    leader = cluster.leader()
    with calling(cluster, images) as callers:
        freeze(cluster.etcd)
        try:
            lost_s = cluster.until(lambda: _store(cluster, leader) == "lost", _NOTICED_S)
            used = _meanwhile(cluster, 4.0)
            callers.more(60)
        finally:
            thaw(cluster.etcd)
        back_s = cluster.until(lambda: _store(cluster, leader) == "ok")
        callers.more(30)
        _written(cluster, *used)
    LOG.info("etcd missed after %.1f s, back after %.1f s", lost_s, back_s)
    LOG.info("%d served, the longest wait %.1f s", callers.begun, callers.longest_wait_s())
    check(cluster, callers)
    assert cluster.leader() == leader


def _store(cluster: LiveCluster, scheduler: str) -> Any:
    return cluster.shown(scheduler).get("store")


def _meanwhile(cluster: LiveCluster, first: float) -> tuple[str, str]:
    """A model that nobody knew before is used; its name, and the node."""
    image = weights(struct.pack("4f", *[first] * 4) + bytes(4096))
    cluster.bring(image)
    given = asyncio.run(lease(cluster, image))
    asyncio.run(release(cluster, given))
    return model_of(image), given.placement.node


def _written(cluster: LiveCluster, model: str, node: str) -> None:
    """Wait until etcd has the profile of the model, and of every GPU what is on it."""

    def there() -> bool:
        stored = asyncio.run(_read(cluster, LRU))
        orders = {name(LRU, gpu).partition("/")[0]: order for gpu, order in stored.items()}
        found = {node: {each["model"] for each in orders[node]["models"]} for node in orders}
        return found == {node: cluster.residents(node) for node in cluster.nodes}

    cluster.until(there)
    assert key(MODELS, model) in asyncio.run(_read(cluster, MODELS))
    assert model in cluster.residents(node)


async def _read(cluster: LiveCluster, kind: str) -> Mapping[str, Any]:
    """What etcd has, asked directly."""
    async with cluster.store() as store:
        found = (await store.list(kind)).values
        return {each: json.loads(value) for each, value in found.items()}
