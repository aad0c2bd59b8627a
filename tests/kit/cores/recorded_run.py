"""Records a live run for tests/recordings: `python -m tests.kit.cores.recorded_run FILE`.

A scheduler, two fake nodes of two GPUs each with loads that take time, callers
that acquire, hold and release, some that give up, and a policy that is changed in between.
"""

import asyncio
import sys
from pathlib import Path
from random import Random

from scheduler.model.errors import RequestEnded
from scheduler.model.values import Request, RequestId
from scheduler.service.access import ApiRole, token
from scheduler.service.driver import Driver
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.http.app import listen, make_app, serving
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Serving, Settings
from tests.kit.cores.builders import gpu, request
from tests.kit.nodes.attaching import attach_in_process
from tests.kit.nodes.fake_node import FakeNode, fake_node
from tests.kit.worlds.waiting_caller import WaitingCaller

_SECRET = b"a secret of recordings"
_MODELS = tuple(f"model{number}" for number in range(8))
_REQUESTS = 80
_POLICIES = ("lb", "netgain", "lalbo3")


def _nodes() -> list[FakeNode]:
    names = ("n0", "n1")
    return [
        fake_node(
            name,
            *(gpu(f"{name}.{number}", node=name, memory_mb=3072) for number in range(2)),
            load_s=0.05,
            end_s=0.001,
        )
        for name in names
    ]


async def _record(path: Path) -> None:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    recorder = RunRecorder(path)
    settings = Settings(scheduler=Serving(max_waiting=20))
    service = SchedulerService(settings, _SECRET, "recorded", url, recorder)
    random = Random(1)
    async with (
        serving(make_app(service), listener, streams=service.serve_stream),
        service.lead(1) as office,
        WaitingCaller([url], token(_SECRET, ApiRole.CALLER)) as client,
    ):
        for node in _nodes():
            attach_in_process(office.driver, node)
        callers = []
        for number in range(_REQUESTS):
            asked = request(f"r{number}", random.choice(_MODELS))
            called = _call(client, office.driver, asked, random.uniform(0.005, 0.03))
            callers.append(asyncio.create_task(called))
            await asyncio.sleep(random.expovariate(100.0))
            if number % 20 == 10:
                policy = _POLICIES[number // 20 % len(_POLICIES)]
                await office.driver.set_policy(policy)
                callers[random.randrange(number)].cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    recorder.close()


async def _call(client: WaitingCaller, driver: Driver, asked: Request, held_s: float) -> None:
    try:
        granted = await client.acquire(asked)
    except RequestEnded:
        return
    await asyncio.sleep(held_s)
    if not asked.id.endswith("7"):
        client.release(granted.placement.lease)
        return
    driver.release(granted.placement.lease, may_return=True)
    again = await driver.wanted(RequestId(asked.id))
    driver.release(again.lease)


if __name__ == "__main__":
    asyncio.run(_record(Path(sys.argv[1])))
