"""An asyncio service: calls in the loop, in an executor and through a batching queue."""

import asyncio
import sys

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 4)).to(device).eval()


def predict(x):
    with torch.no_grad():
        return model(x.to(device)).cpu()


async def in_loop(x):
    await asyncio.sleep(0)
    return predict(x)


async def in_thread(x):
    return await asyncio.to_thread(predict, x)


async def batcher(queue):
    while True:
        waiting = [await queue.get()]
        while len(waiting) < 4:
            waiting.append(await queue.get())
        answers = await asyncio.to_thread(predict, torch.stack([x for x, _ in waiting]))
        for (_, future), row in zip(waiting, answers, strict=True):
            future.set_result(row)


async def batched(queue, x):
    future = asyncio.get_running_loop().create_future()
    await queue.put((x, future))
    return await future


async def main():
    results = {}
    inputs = [torch.randn(2, 12) for _ in range(8)]
    queue = asyncio.Queue()
    task = asyncio.create_task(batcher(queue))
    results["loop"] = await asyncio.gather(*(in_loop(x) for x in inputs))
    results["threads"] = await asyncio.gather(*(in_thread(x) for x in inputs))
    results["batched"] = await asyncio.gather(*(batched(queue, x[0]) for x in inputs))
    task.cancel()
    return results


torch.save(asyncio.run(main()), path)
