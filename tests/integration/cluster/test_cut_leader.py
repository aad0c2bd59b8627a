"""The scheduler that leads is cut off, from some or from all, under load."""

import time

import pytest

from tests.integration.cluster.terms import term_led
from tests.kit.engines.real_etcd import LOG, needs_etcd
from tests.kit.nodes.manager_client import SealedWeights
from tests.kit.processes.live_callers import calling, check
from tests.kit.processes.live_cluster import ETCD, NODES, LiveCluster
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.etcd, needs_etcd]

# The nodes' silence is noticed within 3 s; they are given up after 10 s more.
_CUT_S = 5.0


def test_nobody_is_lost_when_the_leader_is_cut_off_from_etcd_alone(
    cluster: LiveCluster, images: list[SealedWeights]
) -> None:
    _cut(cluster, images, ETCD)


def test_nobody_is_lost_when_the_leader_is_cut_off_from_everything(
    cluster: LiveCluster, images: list[SealedWeights]
) -> None:
    if not cluster.net.silent:
        pytest.skip("needs network name spaces: callers notice a host that acknowledges nothing")
    _cut(cluster, images)


def test_nobody_is_lost_when_the_leader_is_cut_off_from_its_nodes(
    cluster: LiveCluster, images: list[SealedWeights]
) -> None:
    """It leads on, nobody else can know that it has no nodes."""
    leader = cluster.leader()
    leaders = {leader: term_led(cluster)}
    with calling(cluster, images) as callers:
        cluster.net.cut(leader, *NODES)
        time.sleep(_CUT_S)
        cluster.net.heal()
        healed_s = callers.more(60)
    LOG.info("60 served %.1f s after the cut was healed", healed_s)
    wait_until(lambda: cluster.leaders() == leaders, "it leads on, in its term")
    check(cluster, callers, parted=True)


def _cut(cluster: LiveCluster, images: list[SealedWeights], *others: str) -> None:
    leader = cluster.leader()
    other = cluster.other(leader)
    term = term_led(cluster)
    with calling(cluster, images) as callers:
        cluster.net.cut(leader, *others)
        led_s = wait_until(lambda: bool(cluster.shown(other).get("leading")), "the other one leads")
        served_s = led_s + callers.more(60, after_term=term)
        cluster.net.heal()
        healed_s = wait_until(
            lambda: list(cluster.leaders()) == [other], "the other one alone leads"
        )
        callers.more(30, after_term=term)
    LOG.info("led by the other after %.1f s, 60 served by then: %.1f s", led_s, served_s)
    LOG.info("one leads %.1f s after the cut was healed", healed_s)
    LOG.info("%d served, the longest wait %.1f s", callers.begun, callers.longest_wait_s())
    check(cluster, callers, parted=True)
