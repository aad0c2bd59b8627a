"""What a request was given: known in its own tasks and threads, and nowhere else."""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cache_manager.model import GpuId, NodeId
from scheduler.leases import LeaseClaims, sign
from scheduler.model import LeaseId, RequestId, SlotId
from torch_shim import placement

CLAIMS = LeaseClaims(
    LeaseId(7), RequestId("r"), "team/f", NodeId("n1"), GpuId("g"), SlotId("s"), 1, 2e9
)
TOKEN = sign(CLAIMS, b"a secret")


def token() -> str | None:
    """That of the request which is served here."""
    found = placement.current()
    return None if found is None else found.token


def test_placement_is_known_inside_and_gone_outside() -> None:
    assert placement.current() is None
    with placement.given(" unix:/a , tcp:b:1 ", TOKEN):
        found = placement.current()
        assert found is not None
        assert (found.addresses, found.token, found.node) == (("unix:/a", "tcp:b:1"), TOKEN, "n1")
    assert placement.current() is None


@pytest.mark.parametrize(("addresses", "given"), [(None, None), ("", "x"), ("tcp:a:1", "")])
def test_request_has_no_placement_when_a_header_is_missing(
    addresses: str | None, given: str | None
) -> None:
    with placement.given("tcp:a:1", "outer"), placement.given(addresses, given):
        assert placement.current() is None


@pytest.mark.parametrize("given", [(None, None), ("tcp:a:1", TOKEN)])
def test_models_are_told_in_order_of_first_use(given: tuple[str | None, str | None]) -> None:
    assert placement.used() == []
    with placement.given(*given):
        for digest in "bab":
            placement.note(digest)
        assert placement.used() == ["b", "a"]
    assert placement.used() == []
    with placement.given(*given):
        assert placement.used() == []


def test_models_are_each_requests_own_when_two_are_served_at_once() -> None:
    async def serve(digest: str) -> list[str]:
        with placement.given(None, None):
            await asyncio.sleep(0.01)
            await asyncio.to_thread(placement.note, digest)
            return placement.used()

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(serve("a"), serve("b")))

    assert asyncio.run(both()) == [["a"], ["b"]]


def test_models_of_a_thread_are_nobodys_when_its_request_is_over() -> None:
    with placement.given(None, None):
        context = contextvars.copy_context()
    context.run(placement.note, "a")
    assert context.run(placement.used) == []


def test_models_are_not_told_without_end() -> None:
    with placement.given(None, None):
        for number in range(1000):
            placement.note(f"{number:064}")
        assert placement.used() == [f"{number:064}" for number in range(64)]


def test_what_is_to_be_done_at_a_requests_end_is_done_once() -> None:
    done: list[bool] = []
    with placement.given("tcp:a:1", TOKEN):
        found = placement.current()
        assert found is not None
        found.at_end(lambda: done.append(found.over))
        assert done == []
    assert done == [True]


def test_requests_at_once_have_their_own_in_one_event_loop() -> None:
    async def serve(name: str) -> list[str | None]:
        with placement.given("tcp:a:1", name):
            await asyncio.sleep(0.01)
            within = await asyncio.create_task(asyncio.sleep(0.0, token()))
            beside = await asyncio.to_thread(token)
            return [token(), within, beside]

    async def all_at_once() -> list[list[str | None]]:
        return await asyncio.gather(*(serve(f"t{number}") for number in range(5)))

    assert asyncio.run(all_at_once()) == [[f"t{number}"] * 3 for number in range(5)]


def test_threads_of_a_pool_know_of_none() -> None:
    with ThreadPoolExecutor(1) as pool, placement.given("tcp:a:1", "t"):
        assert pool.submit(token).result() is None


def test_thread_that_outlives_its_request_asks_by_itself() -> None:
    async def serve() -> None:
        answered = threading.Event()

        def work() -> tuple[bool, str | None]:
            answered.wait()
            return placement.served(), token()

        with placement.given("tcp:a:1", "t"):
            working = asyncio.create_task(asyncio.to_thread(work))
            await asyncio.sleep(0.01)
        answered.set()
        assert await working == (True, None)

    asyncio.run(serve())


@pytest.mark.parametrize("odd", ["", "x", "x.y", "eyJhIjoxfQ.mac", "bnVsbA.mac", "\u00e4.mac"])
def test_token_names_no_node_when_it_is_none(odd: str) -> None:
    assert placement.node_of(odd) is None
