"""The scheduler that leads is frozen under load: it answers nobody, and hangs up on nobody."""

import time

import pytest

from tests.integration.cluster.terms import term_led
from tests.kit.engines.real_etcd import LOG, needs_etcd
from tests.kit.nodes.manager_client import SealedWeights
from tests.kit.processes.live_callers import calling, check
from tests.kit.processes.live_cluster import LiveCluster, freeze, thaw
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.etcd, needs_etcd]

# 3 s until the datastore gives the leader up; then callers that wait find the other one. A busy
# machine takes longer for both.
_SERVED_WITHIN_S = 45.0
_THAWED_FOR_S = 1.0


def test_callers_leave_a_frozen_leader_and_it_steps_down_when_it_is_thawed(
    cluster: LiveCluster, images: list[SealedWeights]
) -> None:
    leader = cluster.leader()
    other = cluster.other(leader)
    term = term_led(cluster)
    with calling(cluster, images) as callers:
        freeze(cluster.schedulers[leader])
        try:
            led_s = wait_until(
                lambda: bool(cluster.shown(other).get("leading")), "the other one leads"
            )
            served_s = led_s + callers.more(60, after_term=term)
        finally:
            thaw(cluster.schedulers[leader])
        stepped_down_s = wait_until(
            lambda: list(cluster.leaders()) == [other], "the other one alone leads"
        )
        time.sleep(_THAWED_FOR_S)
        callers.more(30, after_term=term)
    assert "no longer leads" in cluster.schedulers[leader].said()
    LOG.info("led by the other after %.1f s, 60 served by then: %.1f s", led_s, served_s)
    LOG.info("the first stepped down %.1f s after the thaw", stepped_down_s)
    LOG.info("%d served, the longest wait %.1f s", callers.begun, callers.longest_wait_s())
    assert callers.longest_wait_s() < _SERVED_WITHIN_S
    check(cluster, callers, parted=True)
