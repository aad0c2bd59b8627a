"""A model's load as a worker sees it: the order with its descriptors, the time that it may take."""

import asyncio
import os
from collections.abc import Coroutine, Iterator

from common.time_limits import time_limit
from gpu_manager.runtimes.runtime import LoadOrder, LoadSpan
from gpu_manager.runtimes.workers.fork_client import ForkedWorker
from gpu_manager.worker import worker_orders


async def send_image(worker: ForkedWorker, number: int, order: LoadOrder, *, shared: bool) -> None:
    """Have the worker load the image of this order, also while the image arrives."""
    load = worker_orders.LoadImage(
        number,
        order.digest,
        [list(entry) for entry in order.table],
        order.total_bytes,
        order.limit_bytes,
        order.emulation.load_s,
        order.emulation.run_s,
        order.arrival is not None,
        shared,
        order.gpu_share,
        order.merged,
        order.together_bytes,
        order.urgency.is_ahead,
    )
    if order.arrival is None:
        await worker.send(load, [order.image])
        return
    pipe = order.arrival.follow()
    try:
        await worker.send(load, [order.image, pipe])
    finally:
        os.close(pipe)


async def load_within(
    timeout_s: float, order: LoadOrder, work: Coroutine[None, None, None]
) -> None:
    """Do the work of a load; raise TimeoutError if it takes longer than the image and this time."""
    loading = asyncio.ensure_future(work)
    try:
        if order.arrival is not None:
            over = asyncio.ensure_future(order.arrival.over())
            await asyncio.wait({loading, over}, return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
        async with time_limit(timeout_s):
            await loading
    finally:
        loading.cancel()
        await asyncio.wait({loading})


def spans_of(loaded: worker_orders.ImageLoaded, begin_s: float) -> Iterator[LoadSpan]:
    """Return what a worker says of its load; a context that it had before is no part of it."""
    for phase, times in (("context", loaded.context), ("transfer", loaded.transfer)):
        if len(times) == len(("begin", "end")) and begin_s < times[1]:
            yield LoadSpan(phase, max(begin_s, times[0]), times[1])
