"""How long a load may take: reading its image does not count."""

import asyncio
from concurrent.futures import Future

import pytest
from msgspec import structs

from gpu_manager.runtimes.hosting_worker import load_within, spans_of
from gpu_manager.runtimes.runtime import LoadOrder, LoadSpan
from gpu_manager.weights.host_images import ImageRequest
from gpu_manager.weights.image_requests import ImageFeed
from gpu_manager.worker import orders
from tests.kit.virtual_time import virtually


class SlowArrival(ImageFeed):
    """An image that takes so long to be read."""

    def __init__(self, read_s: float) -> None:
        super().__init__(ImageRequest(Future(), -1), 0)
        self.read_s = read_s

    async def over(self) -> None:
        await asyncio.sleep(self.read_s)


def order(read_s: float | None = None) -> LoadOrder:
    arrival = None if read_s is None else SlowArrival(read_s)
    return LoadOrder("m", "t", "g0", "cpu", "d", (), 0, image=-1, limit_bytes=0, arrival=arrival)


@virtually
async def test_load_may_take_its_time_when_its_image_is_there_late() -> None:
    await load_within(20.0, order(read_s=100.0), asyncio.sleep(119.0))

    assert asyncio.get_running_loop().time() == 119.0


@virtually
async def test_load_is_over_when_its_time_has_passed() -> None:
    for read_s, over_s in ((None, 20.0), (100.0, 140.0)):
        with pytest.raises(TimeoutError):
            await load_within(20.0, order(read_s), asyncio.sleep(200.0))
        assert asyncio.get_running_loop().time() == over_s


@virtually
async def test_load_that_fails_is_over_before_its_image_is_read() -> None:
    async def fail() -> None:
        await asyncio.sleep(1.0)
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        await load_within(20.0, order(read_s=100.0), fail())

    assert asyncio.get_running_loop().time() == 1.0


@virtually
async def test_work_has_ended_when_its_load_is_cancelled() -> None:
    ended: list[float] = []

    async def work() -> None:
        try:
            await asyncio.sleep(50.0)
        finally:
            ended.append(asyncio.get_running_loop().time())

    loading = asyncio.ensure_future(load_within(20.0, order(read_s=100.0), work()))
    await asyncio.sleep(5.0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading

    assert ended == [5.0]


def test_context_that_was_made_before_is_no_part_of_a_load() -> None:
    loaded = orders.ImageLoaded(1, 0.5, 1, [1.0, 2.0], [9.9, 10.5])

    assert list(spans_of(loaded, 10.0)) == [LoadSpan("transfer", 10.0, 10.5)]
    assert [span.phase for span in spans_of(loaded, 1.5)] == ["context", "transfer"]
    assert list(spans_of(structs.replace(loaded, transfer=[]), 10.0)) == []
