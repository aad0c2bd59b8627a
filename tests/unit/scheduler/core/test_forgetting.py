"""What a core forgets of models that are gone, and what it keeps of those that are needed."""

from collections.abc import Iterator
from itertools import islice, permutations

from cache_manager.model.ids import MIB, ModelId, Tier
from scheduler.core.core import Core
from scheduler.model.events import ModelDemoted, ModelRegistered
from scheduler.model.values import CoreSettings, ModelSpec
from tests.kit.cores.builders import a_core, gpu, request
from tests.kit.cores.core_world import World

MOST = 20
SETTINGS = CoreSettings(most_models=MOST)


def a_world() -> World:
    return World(a_core(gpus=(gpu("g0"),), settings=SETTINGS, models=()))


def names(count: int, prefix: str = "m") -> Iterator[ModelId]:
    return (ModelId(f"{prefix}{number}") for number in range(count))


def register(core: Core, models: Iterator[ModelId]) -> None:
    for model in models:
        core.handle(ModelRegistered(ModelSpec(model, 100 * MIB)), 0.0)


def test_models_that_nothing_needs_are_forgotten_the_longest_unused_first() -> None:
    core = a_world().core
    register(core, names(1000))
    known = list(core.cluster.profiles.known)
    assert len(known) <= MOST * 1.1
    assert known[-1] == "m999"
    assert "m0" not in known


def test_model_that_some_node_has_or_a_request_names_is_kept() -> None:
    world = a_world()
    node = gpu("g0").node
    register(world.core, names(3, "kept"))
    world.send(ModelDemoted(node, None, ModelId("kept0"), Tier.DISK))
    world.arrive(request("r0", "kept1"))  # its lease holds it
    world.arrive(request("r1", "kept2"))  # it waits
    register(world.core, names(1000))
    known = world.core.cluster.profiles.known
    assert {"kept0", "kept1", "kept2"} <= known.keys()
    assert len(known) <= MOST * 1.1
    world.send(ModelDemoted(node, None, ModelId("kept0"), Tier.ABSENT))
    register(world.core, names(1000, "later"))
    assert "kept0" not in known


def test_models_beyond_the_bound_are_kept_while_nodes_have_them() -> None:
    core = a_world().core
    register(core, names(200))
    for model in names(200, "stored"):
        register(core, iter([model]))
        core.handle(ModelDemoted(gpu("g0").node, None, model, Tier.HOST), 0.0)
    assert set(names(200, "stored")) <= core.cluster.profiles.known.keys()


def test_requests_for_ever_other_models_leave_nothing_behind() -> None:
    world = a_world()
    for number in range(2000):
        arrived = world.arrive(request(f"r{number}", f"m{number}"))
        assert arrived
        world.free("g0")
    cluster = world.core.cluster
    residents = cluster.index.gpus[gpu("g0").id].residents
    assert len(cluster.profiles.known) <= MOST * 1.1 + len(residents)
    assert len(cluster.bundles) <= 10 * MOST
    assert cluster.index.load_s(ModelId("m0")) == 0.0  # it was more when m0 was loaded
    assert cluster.index.load_s(next(iter(residents))) > 0.0


def test_orders_of_the_same_models_are_not_all_remembered() -> None:
    world = a_world()
    for number, order in enumerate(islice(permutations("abcdefg"), 1000)):
        world.arrive(request(f"r{number}", *order))
        world.free("g0")
    assert len(world.core.cluster.bundles) <= 10 * MOST
