"""The scheduler that leads dies without a word, under load."""

import pytest

from tests.integration.cluster.terms import term_led
from tests.kit.engines.real_etcd import LOG, needs_etcd
from tests.kit.nodes.manager_client import SealedWeights
from tests.kit.processes.live_callers import calling, check
from tests.kit.processes.live_cluster import LiveCluster
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.etcd, needs_etcd]

_LATEST_S = 60.0  # it takes 3 s on a machine that does nothing else


def test_other_scheduler_leads_and_nobody_is_lost_when_the_leader_is_killed(
    cluster: LiveCluster, images: list[SealedWeights]
) -> None:
    first = cluster.leader()
    other = cluster.other(first)
    term = term_led(cluster)
    with calling(cluster, images) as callers:
        cluster.schedulers[first].kill()
        took_s = wait_until(
            lambda: bool(cluster.shown(other).get("leading")),
            "the other one leads",
            within_s=_LATEST_S,
        )
        served_s = took_s + callers.more(60, after_term=term)
    LOG.info("led by the other after %.1f s, 60 served by then: %.1f s", took_s, served_s)
    LOG.info("%d served, the longest wait %.1f s", callers.begun, callers.longest_wait_s())
    check(cluster, callers, parted=True)
