"""How a resident is hosted, as its node's reports say."""

from typing import Any

from msgspec.structs import replace

from cache_manager.model.ids import MIB, GpuId, ModelId, Tier
from scheduler.model.events import GpuSnapshot, ModelLoaded, NodeSnapshot, RequestArrived
from scheduler.service.survey import Hosting, hosting_of
from tests.kit.cores.builders import a_core, gpu, request
from tests.kit.cores.core_world import World

G0 = GpuId("g0")
ONE, TWO = ModelId("team/one"), ModelId("team/two")
SIZES = ((ONE, 300 * MIB), (TWO, 200 * MIB))


def hosting(world: World, model: str) -> Hosting:
    return hosting_of(world.core.cluster.gpus[G0], ModelId(model))


def report(world: World, **more: Any) -> None:
    """The node reports both models, and what else is named."""
    spec = gpu("g0")
    snapshot = replace(GpuSnapshot(spec, SIZES), **more)
    world.send(NodeSnapshot(spec.node, (snapshot,)))


def test_hosting_is_unknown_until_the_model_is_loaded() -> None:
    world = World(a_core())
    world.send(RequestArrived(request("r0")))
    assert hosting(world, "bert") == Hosting(None, 0, 1.0)
    world.send(ModelLoaded(G0, ModelId("bert"), 1.0, Tier.ABSENT, gpu_share=0.25))
    assert hosting(world, "bert") == Hosting("process", 1, 0.25)


def test_models_of_one_process_are_counted_and_keep_their_shares() -> None:
    world = World(a_core())
    report(world, shared=((100 * MIB, (ONE, TWO)),), gpu_shares=((TWO, 0.5),))
    assert hosting(world, ONE) == Hosting("stream", 2, 1.0)
    assert hosting(world, TWO) == Hosting("stream", 2, 0.5)


def test_a_report_without_a_share_ends_what_an_earlier_one_said() -> None:
    world = World(a_core())
    report(world, gpu_shares=((ONE, 0.25),))
    assert hosting(world, ONE) == Hosting("process", 1, 0.25)
    report(world)
    assert hosting(world, ONE) == Hosting("process", 1, 1.0)


def test_shares_of_models_that_are_not_there_change_nothing() -> None:
    world = World(a_core())
    report(world, gpu_shares=((ModelId("team/gone"), 0.25),))
    world.send(ModelLoaded(G0, ONE, 1.0, Tier.ABSENT))
    assert hosting(world, ONE) == Hosting("process", 1, 1.0)
