"""What a gateway tells the scheduler of its functions' own terms."""

from pathlib import Path

import pytest

from scheduler.model.owner_terms import OwnerTerms
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import FakeLeases
from tests.kit.worlds.gateway_world import World, gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)

F = "openfaas-fn/f"


def annotated(**more: str) -> dict[str, object]:
    ours = {f"com.gpufaas.{name}": value for name, value in more.items()}
    return {"service": "f", "image": "i", "annotations": {"com.gpufaas.enabled": "true", **ours}}


async def put(world: World, **more: str) -> int:
    return (await world.ask("PUT", "/system/functions", annotated(**more))).status


async def test_scheduler_is_told_at_deployment_update_and_removal(tmp_path: Path) -> None:
    leases = FakeLeases()
    async with gateway_world(tmp_path, leases=leases) as world:
        await world.ask("POST", "/system/functions", annotated(weight="2"))
        await eventually(lambda: leases.told[-1:] == [(F, OwnerTerms(weight=2.0))])
        assert await put(world, leases="3") == 202
        await eventually(lambda: leases.told[-1] == (F, OwnerTerms(leases=3)))
        assert await put(world) == 202
        await eventually(lambda: leases.told[-1] == (F, None))
        await put(world, waiting="1")
        await eventually(lambda: leases.told[-1] == (F, OwnerTerms(waiting=1)))
        await world.ask("DELETE", "/system/functions", {"functionName": "f"})
        await eventually(lambda: leases.told[-1] == (F, None))


async def test_scheduler_is_told_at_the_gateways_start(tmp_path: Path) -> None:
    provider = MemoryProvider()
    async with gateway_world(tmp_path, provider) as world:
        await world.ask("POST", "/system/functions", annotated(waiting="1"))
    leases = FakeLeases()
    async with gateway_world(tmp_path, provider, leases=leases):
        assert (F, OwnerTerms(waiting=1)) in leases.told


async def test_scheduler_is_told_nothing_of_a_function_without_a_gpu(tmp_path: Path) -> None:
    leases = FakeLeases()
    async with gateway_world(tmp_path, leases=leases) as world:
        said = annotated(weight="2") | {"annotations": {"com.gpufaas.weight": "2"}}
        assert (await world.ask("POST", "/system/functions", said)).status == 202
        await eventually(lambda: bool(leases.told))
        assert set(leases.told) == {(F, None)}


@pytest.mark.parametrize("name", ["weight", "gpu-seconds", "memory-quota", "leases", "waiting"])
async def test_deployment_is_refused_with_the_annotations_name(tmp_path: Path, name: str) -> None:
    leases = FakeLeases()
    async with gateway_world(tmp_path, leases=leases) as world:
        said = await world.ask("POST", "/system/functions", annotated(**{name: "-1"}))
        assert said.status == 400
        assert f"com.gpufaas.{name}: '-1'" in said.body
        assert not leases.told
