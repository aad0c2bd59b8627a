"""Every job queue and every datastore in turn; one NATS and one etcd a worker."""

import shutil
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.kit.engines.nats_servers import NatsServer, nats_server, remove_streams
from tests.kit.engines.real_etcd import EtcdWorld, an_etcd
from tests.kit.worlds.job_queues import Open, jetstream, prefix_in, sqlite


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as one:
        yield one


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdWorld]:
    """Tests keep apart by the prefixes of their keys."""
    async with an_etcd(tmp_path_factory.mktemp("etcd")) as one:
        yield one


_needs_nats = pytest.mark.skipif(
    shutil.which("nats-server") is None, reason="needs nats-server: `make test-engines` has it"
)


@pytest_asyncio.fixture(params=["sqlite", pytest.param("jetstream", marks=_needs_nats)])
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens each of the queues in turn, as often as a test calls it."""
    if request.param == "sqlite":
        yield partial(sqlite, tmp_path)
        return
    server: NatsServer = request.getfixturevalue("nats")
    yield partial(jetstream, server, tmp_path)
    await remove_streams(server, prefix_in(tmp_path))
