"""Real workers whose weights arrive while they load: verified, cut off, killed, cancelled."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from gpu_manager.devices.image_file import VERIFIED, packed
from gpu_manager.errors import LoadFailure
from gpu_manager.runtimes.process import ProcessRuntime, ProcessSettings
from gpu_manager.runtimes.runtime import HostedModel, LoadOrder
from gpu_manager.runtimes.worker_pool import PoolSettings
from gpu_manager.weights.host_images import ImageRequest
from gpu_manager.weights.image_requests import ImageFeed
from tests.kit.processes.fork_servers import server_pid
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import eventually
from tests.kit.worlds.caller import DIGEST, sealed_image
from tests.kit.worlds.worker_machine import Watcher, children_of

POOL = PoolSettings(least=0, most=0, forked=0, refill_delay_s=0.0)


class Following(ImageFeed):
    """An arrival whose pipes a test writes to."""

    def __init__(self) -> None:
        super().__init__(ImageRequest(Future(), -1), 0)
        self.pipes: list[int] = []
        self.is_over = asyncio.Event()

    def follow(self) -> int:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self.pipes.append(writing)
        return reading

    async def over(self) -> None:
        await self.is_over.wait()

    def say(self, number: int) -> None:
        os.write(self.pipes[-1], packed(number))

    def close(self) -> None:
        while self.pipes:
            os.close(self.pipes.pop())


@pytest.fixture
def image() -> Iterator[tuple[int, tuple[tuple[int, int], ...], int]]:
    descriptor, table, total = sealed_image(torch.ones(4096))
    yield descriptor, table, total
    os.close(descriptor)


class World:
    """A runtime with an empty pool, and one load of an arriving image."""

    def __init__(self, image: tuple[int, tuple[tuple[int, int], ...], int]) -> None:
        self.watcher = Watcher()
        self.runtime = ProcessRuntime(
            self.watcher, ["cpu"], ProcessSettings(pool=POOL, load_timeout_s=20)
        )
        self.arrival = Following()
        descriptor, self.table, self.total = image
        self.order = LoadOrder(
            *("m", "t", "g0", "cpu", DIGEST, self.table, self.total, descriptor),
            limit_bytes=1 << 30,
            arrival=self.arrival,
        )

    async def __aenter__(self) -> "World":
        hosted = await self.runtime.load(
            LoadOrder(
                *("first", "t", "g0", "cpu", DIGEST, self.table, self.total, self.order.image),
                limit_bytes=1 << 30,
            )
        )
        await hosted.unload()  # the process that forks workers is there
        self.before = open_files()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.arrival.close()
        await self.runtime.close()

    def load(self) -> "asyncio.Task[HostedModel]":
        return asyncio.ensure_future(self.runtime.load(self.order))

    async def followed(self, times: int = 1) -> None:
        await eventually(lambda: len(self.arrival.pipes) == times, "a worker follows")

    async def ends(self) -> None:
        """Nothing is left of a load: no worker, no descriptor."""
        self.arrival.close()
        server = server_pid(self.runtime)
        assert server is not None
        await eventually(lambda: not children_of(server), "no worker is left")
        await eventually(
            lambda: not opened_since(self.before),
            "no descriptor is left",
            instead=lambda: str(opened_since(self.before)),
        )
        await eventually(lambda: not self.runtime.hosted, "the runtime knows it")


async def test_model_is_loaded_when_its_weights_were_verified(
    image: tuple[int, tuple[tuple[int, int], ...], int],
) -> None:
    async with World(image) as it:
        loading = it.load()
        await it.followed()
        for end in (4096, it.total):
            it.arrival.say(end)
        done, _ = await asyncio.wait({loading}, timeout=0.2)
        assert not done

        it.arrival.say(VERIFIED)
        it.arrival.is_over.set()
        hosted = await loading

        assert [span.phase for span in hosted.load_spans] == ["worker", "context", "transfer"]
        await hosted.unload()
        await it.ends()


async def test_load_fails_when_its_weights_stop_in_the_middle(
    image: tuple[int, tuple[tuple[int, int], ...], int],
) -> None:
    async with World(image) as it:
        loading = it.load()
        await it.followed()
        it.arrival.say(4096)
        it.arrival.close()

        with pytest.raises(LoadFailure, match="did not arrive"):
            await loading

        await it.ends()


async def test_another_worker_follows_from_the_beginning_when_the_first_one_dies(
    image: tuple[int, tuple[tuple[int, int], ...], int],
) -> None:
    async with World(image) as it:
        loading = it.load()
        await it.followed()
        it.arrival.say(4096)
        (model,) = it.runtime.hosted
        worker = model.host.pid
        os.kill(worker, signal.SIGKILL)
        await it.followed(times=2)
        it.arrival.say(it.total)
        it.arrival.say(VERIFIED)
        it.arrival.is_over.set()

        hosted = await loading

        assert hosted.host is not None
        assert hosted.host.pid != worker
        await hosted.unload()
        await it.ends()


async def test_nothing_is_left_when_a_load_is_cancelled_while_weights_arrive(
    image: tuple[int, tuple[tuple[int, int], ...], int],
) -> None:
    async with World(image) as it:
        loading = it.load()
        await it.followed()
        it.arrival.say(4096)

        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading

        await it.ends()
        assert it.watcher.deaths == []
