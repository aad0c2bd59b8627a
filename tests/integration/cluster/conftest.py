"""One live cluster for all of these tests; each finds it whole, and may break what it likes.

`GPUFAAS_TEST_RELAYS=1` has it on loopback, as where network name spaces cannot be made.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.engines.real_etcd import LOG
from tests.kit.fakes.sealed_images import images_left
from tests.kit.folder_fixtures import of_folder
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.processes.live_cluster import LiveCluster, live_cluster

pytestmark = pytest.mark.group("cluster", seconds=90)  # of all modules here


@pytest.fixture(scope="module")
def brought(request: pytest.FixtureRequest) -> list[SealedWeights]:
    """What the cluster's nodes have been brought: the two models, and what tests add."""
    return of_folder(request, Path(__file__).parent, _brought)


@contextmanager
def _brought() -> Iterator[list[SealedWeights]]:
    found = [weights(struct.pack("4f", *[first] * 4) + bytes(4096)) for first in (1.0, 2.0)]
    yield found
    for image in found:
        image.close()


@pytest.fixture(scope="module")
def images(brought: list[SealedWeights]) -> list[SealedWeights]:
    """Two small models, whose first rows are 1 and 2."""
    return brought[:2]


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest,
    brought: list[SealedWeights],
    tmp_path_factory: pytest.TempPathFactory,
) -> LiveCluster:
    """The cluster, which takes some seconds to start."""
    folder = tmp_path_factory.mktemp("cluster")
    return of_folder(request, Path(__file__).parent, lambda: _started(folder, brought))


@contextmanager
def _started(folder: Path, brought: list[SealedWeights]) -> Iterator[LiveCluster]:
    relays = "GPUFAAS_TEST_RELAYS" in os.environ
    with live_cluster(folder, brought, alone=relays) as found:
        with found.net.inside():
            found.whole()
        yield found


@pytest.fixture(scope="module", autouse=True)
def no_image_is_left(brought: list[SealedWeights]) -> Iterator[None]:
    """None but the cluster's, which later modules of this folder share."""
    yield
    left = images_left(kept=len(brought))
    assert not left, f"tests of this module left {left} images open"


@pytest.fixture
def cluster(started: LiveCluster) -> Iterator[LiveCluster]:
    """The cluster, with all that belongs to it, on whose network the test is."""
    with started.net.inside():
        LOG.info("whole after %.1f s", started.whole())
        yield started
