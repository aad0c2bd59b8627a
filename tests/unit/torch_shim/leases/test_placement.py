"""What a request was given: known in its own tasks and threads, and nowhere else."""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, NodeId
from scheduler.model.values import LeaseId, RequestId, SlotId
from scheduler.wire.lease_tokens import LeaseClaims, LeaseTokens
from torch_shim.leases import request_context

CLAIMS = LeaseClaims(
    LeaseId(7), RequestId("r"), "team/f", NodeId("n1"), GpuId("g"), SlotId("s"), 1, 2e9
)
TOKEN = LeaseTokens(b"a secret").sign(CLAIMS)


def token() -> str | None:
    """That of the request which is served here."""
    found = request_context.current()
    return None if found is None else found.token


def test_placement_is_known_inside_and_gone_outside() -> None:
    assert request_context.current() is None
    with request_context.given(" unix:/a , tcp:b:1 ", TOKEN):
        found = request_context.current()
        assert found is not None
        assert (found.token, found.claims.node) == (TOKEN, "n1")
    assert request_context.current() is None


@pytest.mark.parametrize(("addresses", "given"), [(None, None), ("", "x"), ("tcp:a:1", "")])
def test_request_has_no_placement_when_a_header_is_missing(
    addresses: str | None, given: str | None
) -> None:
    with request_context.given("tcp:a:1", "outer"), request_context.given(addresses, given):
        assert request_context.current() is None


@pytest.mark.parametrize("given", [(None, None), ("tcp:a:1", TOKEN)])
def test_models_are_told_in_order_of_first_use(given: tuple[str | None, str | None]) -> None:
    assert request_context.used() == []
    with request_context.given(*given):
        for digest in "bab":
            request_context.note_model(digest)
        assert request_context.used() == ["b", "a"]
    assert request_context.used() == []
    with request_context.given(*given):
        assert request_context.used() == []


async def test_models_are_each_requests_own_when_two_are_served_at_once() -> None:
    async def serve(digest: str) -> list[str]:
        with request_context.given(None, None):
            await asyncio.sleep(0.01)
            await asyncio.to_thread(request_context.note_model, digest)
            return request_context.used()

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(serve("a"), serve("b")))

    assert (await both()) == [["a"], ["b"]]


def test_models_of_a_thread_are_nobodys_when_its_request_is_over() -> None:
    with request_context.given(None, None):
        context = contextvars.copy_context()
    context.run(request_context.note_model, "a")
    assert context.run(request_context.used) == []


def test_models_are_not_told_without_end() -> None:
    with request_context.given(None, None):
        for number in range(1000):
            request_context.note_model(f"{number:064}")
        assert request_context.used() == [f"{number:064}" for number in range(64)]


def test_what_is_to_be_done_at_a_requests_end_is_done_once() -> None:
    done: list[bool] = []
    with request_context.given("tcp:a:1", TOKEN):
        found = request_context.current()
        assert found is not None
        found.at_end(lambda: done.append(found.over))
        assert done == []
    assert done == [True]


async def test_requests_at_once_have_their_own_in_one_event_loop() -> None:
    async def serve(name: str) -> list[str | None]:
        with request_context.given("tcp:a:1", name):
            await asyncio.sleep(0.01)
            within = await asyncio.create_task(asyncio.sleep(0.0, token()))
            beside = await asyncio.to_thread(token)
            return [token(), within, beside]

    async def all_at_once() -> list[list[str | None]]:
        return await asyncio.gather(*(serve(f"t{number}") for number in range(5)))

    assert (await all_at_once()) == [[f"t{number}"] * 3 for number in range(5)]


def test_threads_of_a_pool_know_of_none() -> None:
    with ThreadPoolExecutor(1) as pool, request_context.given("tcp:a:1", "t"):
        assert pool.submit(token).result() is None


async def test_thread_that_outlives_its_request_asks_by_itself() -> None:
    answered = threading.Event()

    def work() -> tuple[bool, str | None]:
        answered.wait()
        return request_context.served(), token()

    with request_context.given("tcp:a:1", "t"):
        working = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.sleep(0.01)
    answered.set()
    assert await working == (True, None)


@pytest.mark.parametrize("odd", ["", "x", "x.y", "eyJhIjoxfQ.mac", "bnVsbA.mac", "\u00e4.mac"])
def test_token_names_no_node_when_it_is_none(odd: str) -> None:
    assert request_context.claims_of(odd).node is None


def test_few_tokens_are_remembered_when_callers_bring_many() -> None:
    for number in range(1000):
        claims = replace(CLAIMS, node=NodeId(f"n{number}"))
        assert request_context.claims_of(LeaseTokens(b"a secret").sign(claims)).node == f"n{number}"
    assert request_context.claims_of.cache_info().currsize <= 64


def test_request_that_fails_is_over_and_the_outer_one_is_current_again() -> None:
    def fail() -> None:
        with request_context.given("tcp:a:1", TOKEN):
            found = request_context.current()
            assert found is not None
            requests.append(found)
            found.at_end(lambda: ended.append(TOKEN))
            raise ValueError("broken")

    requests: list[request_context.RequestLease] = []
    ended: list[str] = []
    with request_context.given("tcp:a:1", "outer"):
        with pytest.raises(ValueError, match="broken"):
            fail()
        assert requests[0].over
        assert ended == [TOKEN]
        assert token() == "outer"
