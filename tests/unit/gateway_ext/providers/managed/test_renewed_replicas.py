"""A replica that would serve better if it were started now gives its place to another one."""

import asyncio
from dataclasses import replace
from pathlib import Path

from gateway_ext.providers.managed.logs import FunctionLog
from gateway_ext.providers.managed.replicas import (
    ManagedSettings,
    Replica,
    ReplicaSet,
)
from tests.kit.processes.process_functions import Heard
from tests.kit.virtual_time import until, virtually
from tests.unit.gateway_ext.providers.managed.managed_world import (
    DEPLOYMENT,
    F,
    MortalInstance,
    StillFunction,
)


class AgingVersion(ReplicaSet[MortalInstance]):
    """A version whose instances are outdated if they were started before it `ages`.

    They start once they `may_start`.
    """

    deployment = DEPLOYMENT

    def __init__(self, world: "World") -> None:
        log = FunctionLog(F, world.folder, 1 << 20)
        super().__init__(world.function.changed, log, ManagedSettings())
        self.made: list[MortalInstance] = []
        self.old: list[MortalInstance] = []
        self.fails = False
        self.may_start = asyncio.Event()
        self.may_start.set()

    def ages(self) -> None:
        self.old = list(self.made)

    @property
    def outdated(self) -> list[Replica[MortalInstance]]:
        return [one for one in self.replicas if one.ready and one.instance in self.old]

    async def make(self) -> MortalInstance:
        if self.fails:
            raise OSError("no memory")
        await self.may_start.wait()
        self.made.append(MortalInstance(1e6))
        return self.made[-1]


class World:
    """A function whose version has instances that are outdated by now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard = Heard()
        self.function = StillFunction(folder, self.heard)
        self.version = AgingVersion(self)

    async def age(self, count: int) -> None:
        self.function.record = replace(self.function.record, wanted=count)
        self.function.start_with(self.version)
        await until(1.0)
        self.version.ages()
        self.function.changed()

    async def end(self) -> None:
        await self.function.stop(drain=False)
        self.version.log.close()

    @property
    def serving(self) -> list[MortalInstance]:
        return [one.instance for one in self.version.replicas if one.instance is not None]


@virtually
async def test_all_outdated_replicas_are_renewed_and_the_number_stays(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.age(3)
    await until(5.0)
    assert world.serving == world.version.made[3:]
    assert [one.exited.result() for one in world.version.old] == ["was stopped"] * 3
    assert world.heard.least[F] == 1, "as it began"
    await world.end()


@virtually
async def test_function_is_as_it_was_scaled_when_it_was_scaled_during_a_renewal(
    tmp_path: Path,
) -> None:
    for count in (0, 2):
        world = World(tmp_path)
        await world.age(1)
        world.function.scale(count)
        await until(5.0)
        assert len(world.serving) == count
        assert not [one for one in world.serving if one in world.version.old]
        await world.end()


@virtually
async def test_outdated_replica_stays_until_another_one_starts_when_it_fails_at_first(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.age(1)
    world.version.fails = True
    await until(9.0)
    assert world.serving == world.version.old
    assert world.function.available == 1
    world.version.fails = False
    await until(90.0)
    assert world.serving == world.version.made[1:]
    assert len(world.version.made) == 2
    await world.end()


@virtually
async def test_version_is_not_renewed_when_another_one_takes_over_in_the_same_turn(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.function.start_with(world.version)
    coming = AgingVersion(world)
    coming.may_start.clear()

    async def make() -> AgingVersion:
        return coming

    await until(1.0)
    world.function.replace_version(make)
    await until(2.0)
    world.version.ages()
    coming.may_start.set()
    await until(5.0)
    assert world.function.current is coming
    assert len(world.version.made) == 1
    assert world.version.replicas == []
    await world.end()
    coming.log.close()


@virtually
async def test_outdated_replica_is_renewed_when_the_other_one_starts_slowly(tmp_path: Path) -> None:
    for scaled in (False, True):
        world = World(tmp_path)
        await world.age(1)
        world.version.may_start.clear()
        await asyncio.sleep(30.0)
        assert [one.slow is not None for one in world.version.replicas] == [False, True]
        if scaled:
            world.function.scale(1)
        await asyncio.sleep(1.0)
        world.version.may_start.set()
        await asyncio.sleep(1.0)
        assert world.serving == world.version.made[1:]
        assert len(world.version.made) == 2
        await world.end()
