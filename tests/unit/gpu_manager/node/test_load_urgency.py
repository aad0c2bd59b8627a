"""How urgent a load is, on its way from the scheduler's order to the runtime's."""

import asyncio
from typing import Any

from gpu_manager.devices.loads import TransferRank
from scheduler.api import Dispatch, GpuId, LeaseId, ModelId, RequestId
from tests.kit.waiting import eventually
from tests.kit.worlds.gpu_node import GPU, World, world


def grant(it: World, model: ModelId) -> None:
    """A lease of another request, as the scheduler gives it where a slot has several."""
    estimate: Any = None
    names = (RequestId("r9"),)
    slot = it.node.gpus[GPU].slot
    order = Dispatch(
        LeaseId(99), slot, GPU, it.node.name, names, True, False, estimate, "", models=(model,)
    )
    it.node.grant(order)


async def test_load_that_a_request_waits_for_is_no_background_work() -> None:
    async with world() as it:
        model = it.add(2)

        await it.hold(model)

        (order,) = it.runtime.orders
        assert order.urgency.rank is TransferRank.AWAITED


async def test_prefetch_is_background_work_until_a_request_has_a_lease_of_the_model() -> None:
    async with world() as it:
        it.runtime.load_s = 0.5
        model, other = it.add(2), it.add(3)
        prefetching = asyncio.ensure_future(it.driver.prefetch(model, GpuId(GPU)))
        await eventually(lambda: bool(it.runtime.orders), "it is loading")
        (order,) = it.runtime.orders
        heard: list[TransferRank] = []
        order.urgency.listen(heard.append)
        grant(it, other)
        assert order.urgency.is_ahead

        grant(it, model)

        assert heard == [TransferRank.AWAITED]
        await prefetching
