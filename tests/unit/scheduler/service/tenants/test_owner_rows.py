"""What is shown of owners: their terms, and what the core has counted of them."""

from random import Random

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import MIB
from scheduler.features.tenants.owners import GpuWindow, refused_by
from scheduler.model.actions import Action, Finish
from scheduler.model.events import TermsSet
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import Request, RequestOutcome
from scheduler.service.terms import OwnerUse, TermsBook, owner_row, owner_rows
from tests.kit.cores.builders import a_core, model, request
from tests.kit.cores.core_world import World

F = "team/f"
TERMS = OwnerTerms(gpu_s=100.0, leases=1, waiting=2, resident_bytes=900 * MIB)


def asked(name: str, function: str = F) -> Request:
    return replace(request(name, "team/m"), function=function)


def a_world(**terms: OwnerTerms) -> tuple[World, TermsBook]:
    core = a_core(gpus=["g0", "g1"], models=[model("team/m", memory_mb=300, run_s=5.0)])
    world = World(core)

    def apply(owner: str, terms: OwnerTerms | None) -> None:
        world.send(TermsSet(owner, terms))

    return world, TermsBook(apply, terms)


def use_of(world: World, book: TermsBook, owner: str) -> OwnerUse:
    return owner_row(book, world.core, world.now, owner).use


def count(book: TermsBook, actions: list[Action]) -> None:
    for action in actions:
        if isinstance(action, Finish):
            assert action.outcome is RequestOutcome.OVER_QUOTA
            book.count_refusal(*refused_by(action.reason))


def test_use_is_that_of_the_namespace_and_of_each_function() -> None:
    world, book = a_world(team=TERMS)
    book.tell("g", F, OwnerTerms(weight=2.0))
    count(book, world.arrive(asked("r0"), asked("r1"), asked("r2", "team/g"), asked("r3")))
    shown = {row.owner: row for row in owner_rows(book, world.core, world.now)}
    assert list(shown) == ["team", F]
    space = shown["team"].use
    assert (space.leases, space.waiting, space.held_back) == (1, 2, 2)
    assert space.resident_bytes == 300 * MIB
    assert space.refused == {"waiting": 1}
    function = shown[F].use
    assert (function.leases, function.waiting, function.held_back) == (1, 1, 1)
    assert function.refused == {}
    other = use_of(world, book, "team/g")
    assert (other.leases, other.waiting, other.held_back) == (0, 1, 1)
    assert use_of(world, book, "nobody") == OwnerUse()
    assert [row.owner for row in owner_rows(book, world.core, world.now, 1)] == ["team"]


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
    world, book = a_world(team=OwnerTerms(waiting=1, leases=1))
    count(book, world.arrive(asked("r0"), asked("r1"), asked("r2")))
    assert use_of(world, book, "team").refused == {"waiting": 1}
    book.set("team", None)
    book.count_refusal("team", "waiting")
    assert use_of(world, book, "team").refused == {}
