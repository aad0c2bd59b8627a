"""Calls are refused only if nothing that could serve them starts: one version, or one replica."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from gateway_ext.errors import BadDeployment
from gateway_ext.model import Endpoint, Troubles
from gateway_ext.providers.managed.replicas import Replica, ReplicaSet
from tests.kit.processes.process_functions import Heard
from tests.kit.waiting import eventually
from tests.unit.gateway_ext.providers.managed.managed_world import DEPLOYMENT, F, StillFunction

WHY = "pip: there is no such package"
FINE, STARTING, BROKEN = "fine", "starting", "broken"


class StillReplica(Replica[Any]):
    """A replica that is ready, starts, or does not start."""

    def __init__(self, state: str) -> None:
        self.broken = WHY if state == BROKEN else ""
        self.trouble = self.broken
        self.instance = None
        self.slow = None
        self._deaths = 0
        self._state = state

    @property
    def ready(self) -> bool:
        return self._state == FINE


class StillVersion(ReplicaSet[Any]):
    """A version whose replicas, as many as there are states, are as these say."""

    deployment = DEPLOYMENT

    def __init__(self, *states: str) -> None:
        self.replicas = [StillReplica(state) for state in states]

    async def make(self) -> Any:
        raise NotImplementedError

    def resize(self, wanted: int) -> list[Replica[Any]]:
        leaving = self.replicas[wanted:]
        del self.replicas[wanted:]
        return leaving

    @property
    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("f-1", "tcp:1.2.3.4:80") for one in self.replicas if one.ready]


class World:
    """A function whose current version is there, and what it reports."""

    def __init__(self, current: StillVersion | None) -> None:
        self.heard = Heard()
        with TemporaryDirectory() as folder:
            self.function = StillFunction(Path(folder), self.heard)
        self.function.log.close()
        self.function.current = current

    @property
    def troubles(self) -> Troubles:
        self.function.notify()
        return self.heard.troubles[F]

    async def update(self, make: Callable[[], Awaitable[StillVersion]], expected: Troubles) -> None:
        self.function.replace_version(make)
        await eventually(lambda: self.troubles == expected, f"{expected}")


async def _no_build() -> StillVersion:
    raise BadDeployment(WHY)


async def _broken() -> StillVersion:
    return StillVersion(BROKEN)


@pytest.mark.parametrize("make", [_no_build, _broken])
@pytest.mark.parametrize("states", [(FINE,), (STARTING,), ()])
async def test_calls_wait_for_the_version_that_serves_when_its_update_does_not_start(
    states: tuple[str, ...], make: Callable[[], Awaitable[StillVersion]]
) -> None:
    world = World(StillVersion(*states))
    await world.update(make, Troubles(partly=WHY))


async def test_calls_are_refused_when_neither_the_first_version_nor_its_update_starts() -> None:
    world = World(StillVersion(BROKEN))
    await world.update(_no_build, Troubles(start=WHY))
    await World(None).update(_no_build, Troubles(start=WHY))


async def test_calls_wait_for_an_update_that_is_being_made_when_the_version_before_is_broken() -> (
    None
):
    world = World(StillVersion(BROKEN))
    assert world.troubles == Troubles(start=WHY)
    gate = asyncio.Event()

    async def make() -> StillVersion:
        await gate.wait()
        return StillVersion(STARTING)

    world.function.replace_version(make)
    assert not world.troubles.start, "it may become ready soon"
    gate.set()
    await eventually(lambda: world.function.coming is not None, "it starts")
    assert world.troubles == Troubles(partly=WHY)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((BROKEN, STARTING, STARTING), Troubles(partly=WHY)),
        ((FINE, BROKEN), Troubles(partly=WHY)),
        ((BROKEN, BROKEN), Troubles(start=WHY)),
        ((), Troubles()),
    ],
)
async def test_calls_are_refused_when_all_replicas_do_not_start_and_not_because_of_one(
    states: tuple[str, ...], expected: Troubles
) -> None:
    assert World(StillVersion(*states)).troubles == expected
