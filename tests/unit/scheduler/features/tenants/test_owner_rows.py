"""What is shown of owners: their terms, and what the core has counted of them."""

from random import Random

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import MIB
from scheduler.features.tenants.owners import GpuWindow
from scheduler.features.tenants.quotas import OwnerUse, Quotas
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import Request
from tests.kit.cores.builders import a_core, model, request
from tests.kit.cores.core_world import World
from tests.kit.worlds.term_parts import term_parts

F = "team/f"
TERMS = OwnerTerms(gpu_s=100.0, leases=1, waiting=2, resident_bytes=900 * MIB)


def asked(name: str, function: str = F) -> Request:
    return replace(request(name, "team/m"), function=function)


def a_world(**terms: OwnerTerms) -> tuple[World, Quotas]:
    core = a_core(gpus=["g0", "g1"], models=[model("team/m", memory_mb=300, run_s=5.0)])
    world = World(core)

    quotas = Quotas(term_parts(core, lambda: world.now, world.send))
    for owner, owner_terms in terms.items():
        quotas.book.set(owner, owner_terms)
    return world, quotas


def test_use_is_that_of_the_namespace_and_of_each_function() -> None:
    world, quotas = a_world(team=TERMS)
    quotas.book.tell("g", F, OwnerTerms(weight=2.0))
    world.arrive(asked("r0"), asked("r1"), asked("r2", "team/g"), asked("r3"))
    shown = {row.owner: row for row in quotas.rows()}
    assert list(shown) == ["team", F]
    space = shown["team"].use
    assert (space.leases, space.waiting, space.held_back) == (1, 2, 2)
    assert space.resident_bytes == 300 * MIB
    assert space.refused == {"waiting": 1}
    function = shown[F].use
    assert (function.leases, function.waiting, function.held_back) == (1, 1, 1)
    assert function.refused == {}
    other = quotas.row("team/g").use
    assert (other.leases, other.waiting, other.held_back) == (0, 1, 1)
    assert quotas.row("nobody").use == OwnerUse()
    assert [row.owner for row in quotas.rows(1)] == ["team"]


def test_looking_changes_nothing() -> None:
    """Else a recording, which has no looks, would not replay."""
    chance, looked, unseen = Random(3), GpuWindow(10.0, 0.0), GpuWindow(10.0, 0.0)
    now = 0.0
    for _ in range(500):
        now += chance.random()
        rate = chance.choice((0.0, 1.0, 3.0))
        seen_s = looked.seen_s(rate, now)
        assert seen_s == pytest.approx(looked.used_s(rate, now), abs=0.51)
        assert looked.used_s(rate, now) == unseen.used_s(rate, now)


def test_refusals_are_forgotten_with_the_terms_of_their_owner() -> None:
    world, quotas = a_world(team=OwnerTerms(waiting=1, leases=1))
    world.arrive(asked("r0"), asked("r1"), asked("r2"))
    assert quotas.row("team").use.refused == {"waiting": 1}
    quotas.book.set("team", None)
    assert quotas.row("team").use.refused == {}
