"""One live cluster for all of these tests; each finds it whole, and may break what it likes.

`GPUFAAS_TEST_RELAYS=1` has it on loopback, as where network name spaces cannot be made.
"""

import os
import struct
from collections.abc import Iterator

import pytest

from testbed.nodes.manager_client import SealedWeights, weights
from tests.kit.engines.real_etcd import LOG
from tests.kit.processes.live_cluster import LiveCluster, live_cluster


@pytest.fixture(scope="package")
def images() -> list[SealedWeights]:
    """Two small models, whose first rows are 1 and 2; they end with the cluster."""
    return [weights(struct.pack("4f", *[first] * 4) + bytes(4096)) for first in (1.0, 2.0)]


@pytest.fixture(scope="package")
def started(
    images: list[SealedWeights], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveCluster]:
    """The cluster, which takes some seconds to start."""
    folder, relays = tmp_path_factory.mktemp("cluster"), "GPUFAAS_TEST_RELAYS" in os.environ
    with live_cluster(folder, alone=relays) as found:
        with found.net.inside():
            found.whole()
            for image in images:
                found.bring(image)
        yield found


@pytest.fixture
def cluster(started: LiveCluster) -> Iterator[LiveCluster]:
    """The cluster, with all that belongs to it, on whose network the test is."""
    with started.net.inside():
        LOG.info("whole after %.1f s", started.whole())
        yield started
