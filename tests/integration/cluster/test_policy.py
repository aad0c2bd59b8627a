"""The policy is changed under load: through the leader, through the other scheduler, in etcd."""

import time
from typing import Any

import pytest

from gpufaas.cli import main
from scheduler.store.stored_records import ADMINISTRATOR, POLICY, PolicyChoice
from scheduler.wire.codec import encoded
from tests.kit.engines.real_etcd import LOG, needs_etcd
from tests.kit.nodes.manager_client import SealedWeights
from tests.kit.processes.live_callers import calling, check
from tests.kit.processes.live_cluster import LiveCluster
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.etcd, needs_etcd]


async def test_nobody_is_lost_when_the_policy_is_changed_under_load(
    cluster: LiveCluster, images: list[SealedWeights]
) -> None:
    leader = cluster.leader()
    with calling(cluster, images) as callers:
        for policy, asked in (("lb", leader), ("rr", cluster.other(leader)), ("lalbo3", leader)):
            assert main(cluster.command("policy", "set", policy, first=asked)) == 0
            LOG.info("%s, asked at %s, after %.2f s", policy, asked, _in_force(cluster, policy))
            callers.more(20)
        choice = PolicyChoice("lalb", {}, ADMINISTRATOR)
        cluster.put_stored(POLICY, encoded(choice))
        LOG.info("%s, put into etcd, after %.2f s", choice.name, _in_force(cluster, choice.name))
        callers.more(20)
        assert main(cluster.command("policy", "set", "lalbo3", first=leader)) == 0
    check(cluster, callers)


def _in_force(cluster: LiveCluster, policy: str) -> float:
    """The seconds until the leader decides by it."""
    began_s = time.monotonic()
    leader = cluster.leader()

    def shown() -> Any:
        return cluster.shown(leader, "/policy").get("policy")

    wait_until(lambda: shown() == policy, "the policy is in force")
    return time.monotonic() - began_s
