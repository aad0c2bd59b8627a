"""What is left of callers that waited: nothing, also before the garbage collector runs."""

import asyncio

from scheduler.service.http.lease_routes import CallerPresence
from tests.kit.without_collector import without_collector

TIMES = 10


async def test_nothing_is_left_of_a_caller_that_got_its_answer() -> None:
    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    async def serve() -> None:
        presence = CallerPresence(receive)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        presence.end()

    with without_collector() as garbage:
        for _ in range(TIMES):
            await asyncio.create_task(serve())
            await asyncio.sleep(0)
        assert garbage() < TIMES
