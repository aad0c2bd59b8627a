"""What gateways tell of their functions: over streams, to the next leader, after their end."""

import asyncio
from contextlib import ExitStack

import pytest

from scheduler.features.tenants.quotas import KEPT_S, TermsBook
from scheduler.features.tenants.tenancy import Tenancy
from scheduler.model.errors import BadValue
from scheduler.model.owner_terms import OwnerTerms
from scheduler.service.access import ApiRole, token
from scheduler.wire.caller_stream import FunctionTerms, ToldTerms, read_up
from scheduler.wire.codec import pack
from tests.kit.cores.builders import request
from tests.kit.virtual_time import until, virtually
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import SECRET, World, a_world, leading
from tests.kit.worlds.waiting_caller import WaitingCaller

pytestmark = pytest.mark.timeout(180, func_only=True)

F, G = "team/f", "team/g"
ONE, TWO = OwnerTerms(leases=1), OwnerTerms(weight=2.0, gpu_s=30.0)


def told(begins: bool = False, **functions: OwnerTerms | None) -> ToldTerms:  # noqa: FBT001, FBT002
    parts = [FunctionTerms(f"team/{name}", terms) for name, terms in functions.items()]
    return ToldTerms(tuple(parts), begins)


def waiting_at(world: World) -> int:
    assert world.office is not None
    return world.office.core.cluster.waiting.count


def in_force(world: World) -> dict[str, OwnerTerms]:
    assert world.office is not None
    return dict(world.office.core.layer(Tenancy).owners.terms)


def test_message_arrives_as_it_was_sent() -> None:
    sent = told(begins=True, f=TWO, g=None)
    assert read_up(pack(sent)) == sent


async def test_terms_are_in_force_when_a_question_is_answered_that_was_asked_after_them() -> None:
    async with leading() as world, world.leases() as client:
        await client.acquire(request("before"))
        assert in_force(world) == {}
        client.tell_terms(F, ONE)
        asked = asyncio.create_task(client.acquire(request("after", "other")))
        await eventually(lambda: waiting_at(world) == 1)
        assert in_force(world) == {F: ONE}
        asked.cancel()


async def test_next_leader_is_told_what_still_holds() -> None:
    async with leading() as first, a_world() as second:
        urls = [first.url, second.url]
        async with WaitingCaller(urls, token(SECRET, ApiRole.CALLER)) as client:
            client.tell_terms(F, ONE)
            client.tell_terms(G, TWO)
            await eventually(lambda: len(in_force(first)) == 2)
            client.tell_terms(F, None)
            await eventually(lambda: in_force(first) == {G: TWO})
            async with second.service.lead(2) as office:
                second.office = office
                await first.service.reign.callers.close()  # type: ignore[union-attr]  # it leads
                first.service.reign = None  # it leads no more
                await eventually(lambda: in_force(second) == {G: TWO})


async def test_stream_ends_when_the_terms_of_a_namespace_are_told() -> None:
    async with leading() as world, world.leases() as client:
        await client.acquire(request("r"))
        client.tell_terms("team", ONE)
        await eventually(lambda: client._line is None)  # noqa: SLF001 - nothing else shows it
        assert in_force(world) == {}


# -- the scheduler's side, on virtual time ---------------------------------------------------------


def a_book() -> TermsBook:
    return TermsBook(lambda _, __: None)


@virtually
async def test_terms_are_kept_for_a_while_when_their_caller_has_left() -> None:
    book = a_book()
    with book.present("g"):
        book.take("g", told(f=ONE))
    await until(KEPT_S - 1)
    assert book.get(F) is not None
    await until(KEPT_S + 1)
    assert book.get(F) is None


@virtually
async def test_terms_stay_when_their_caller_is_back() -> None:
    book = a_book()
    with book.present("g"):
        book.take("g", told(f=ONE, g=ONE))
    with book.present("g"):
        book.take("g", told(begins=True, f=ONE))
        await until(2 * KEPT_S)
        assert list(book) == [F]


@virtually
async def test_what_one_of_two_gateways_told_goes_with_it_alone() -> None:
    book = a_book()
    with ExitStack() as stays:
        stays.enter_context(book.present("g1"))
        book.take("g1", told(f=ONE))
        with book.present("g2"):
            book.take("g2", told(f=TWO, g=TWO))
        await until(2 * KEPT_S)
        found = book.get(F)
        assert found is not None
        assert found.terms == ONE
        assert list(book) == [F]


@pytest.mark.parametrize(
    "wrong",
    [
        ToldTerms((FunctionTerms(G, ONE), FunctionTerms("team", ONE))),
        ToldTerms((FunctionTerms(G, ONE), FunctionTerms("", None))),
        told(g=ONE, f=OwnerTerms(weight=0.0)),
        told(g=ONE, f=OwnerTerms(window_s=0.0)),
    ],
)
def test_nothing_is_taken_of_a_message_that_is_out_of_bounds(wrong: ToldTerms) -> None:
    book = a_book()
    with pytest.raises(BadValue):
        book.take("g", wrong)
    assert not len(book)
