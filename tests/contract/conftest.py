"""Every job queue, one after the other, for the tests that all of them pass."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.job_queues import Open, Run, jetstream, sqlite
from tests.nats_world import NatsServer, nats_server


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as one:
        yield one


@pytest.fixture(params=["sqlite", "jetstream"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs a test against each queue; what the test is given opens it, as often as it likes."""
    if request.param == "sqlite":
        opened = partial(sqlite, tmp_path)
    else:
        opened = partial(jetstream, request.getfixturevalue("nats"), tmp_path)

    def play(test: Callable[[Open], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(test(opened))

    return play
