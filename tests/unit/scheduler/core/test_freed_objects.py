"""What comes and goes is freed at once: the collector of cycles runs seldom, by a large number."""

from msgspec.structs import replace

from scheduler.features.billing.use_meter import UseMeter
from scheduler.model.events import PolicySet, TermsSet
from scheduler.model.owner_terms import OwnerTerms
from tests.kit.cores.builders import a_core, gpu, model, request
from tests.kit.cores.core_world import World
from tests.kit.without_collector import without_collector

TIMES = 100


def test_owners_are_freed_when_terms_come_and_go() -> None:
    """With their windows and heaps they are large."""
    world = World(a_core())

    def come_and_go(number: int) -> None:
        world.send(PolicySet("fair" if number % 2 else "lalbo3"))
        for owner in ("a", "a/f"):
            world.send(TermsSet(owner, OwnerTerms(gpu_s=50.0, leases=1)))
        functions = ("a/f", "a/g", "b/f")
        world.arrive(*(replace(request(f"{each}{number}"), function=each) for each in functions))
        while world.leases:
            world.free("g0", world.now + 1.0)
        for owner in ("a", "a/f"):
            world.send(TermsSet(owner, None))

    with without_collector() as garbage:
        for number in range(TIMES):
            come_and_go(number)
        assert garbage() < TIMES


def test_bills_of_models_are_freed_when_the_models_leave() -> None:
    models = [model(name, memory_mb=3000) for name in ("m0", "m1")]
    world = World(a_core(gpus=(gpu("g0", memory_mb=4000),), models=models))
    world.core.add(UseMeter(world.core.lifecycle, 0.0))

    def load_and_evict(number: int) -> None:
        for _ in range(2):
            world.arrive(replace(request(f"r{world.now}", f"m{number % 2}"), function="a/f"))
            world.free("g0", world.now + 3.0)

    with without_collector() as garbage:
        for number in range(TIMES):
            load_and_evict(number)
        assert garbage() < TIMES
