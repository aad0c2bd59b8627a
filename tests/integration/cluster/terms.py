"""The term in which a live cluster is led."""

from tests.kit.processes.live_cluster import LiveCluster
from tests.kit.waiting import wait_until


def term_led(cluster: LiveCluster) -> int:
    """That of the one who leads: one that is held up does not say so in time when it is asked."""
    found: list[int] = []

    def one_leads() -> bool:
        found[:] = cluster.leaders().values()
        return len(found) == 1

    wait_until(one_leads, "one leads")
    return found[0]
