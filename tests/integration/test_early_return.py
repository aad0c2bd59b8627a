"""Functions that give their leases back early: real managers, workers, shims and a scheduler."""

import asyncio
import random
from pathlib import Path

import pytest

from gpu_manager.node.leases import LeaseTimes
from tests.kit.processes.gateway_like import Answer, gateway_like
from tests.kit.waiting import eventually, wait_until

pytestmark = pytest.mark.group("early_return", seconds=100)

RUN_S = 0.010
# A lease that is not used stays in force: what goes back does so early.
PATIENT = LeaseTimes(quiet_s=60.0, quantum_s=60.0)


def test_gpu_serves_others_when_a_function_works_on_after_its_last_call(tmp_path: Path) -> None:
    """The long request works without the GPU until the short one is answered."""
    over, ended = tmp_path / "over", list[str]()

    async def request(name: str, until: Path | str) -> None:
        assert (await it.served(1, 0.0, until)).right
        ended.append(name)

    async def both() -> None:
        granted = len(it.granted)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(request("long", over))
            await eventually(lambda: len(it.granted) == granted + 1)
            tasks.create_task(request("short", ""))
            await eventually(lambda: ended == ["short"])
            over.touch()

    with gateway_like(tmp_path, RUN_S, leases=PATIENT) as it:
        for _ in range(5):  # until the function's habits are known
            it.call()
        it.node.do(both())
        assert ended == ["short", "long"]


def test_lease_goes_back_when_five_requests_before_were_alike(tmp_path: Path) -> None:
    """The sixth one works on until its lease has come back, however long that takes."""
    over = tmp_path / "over"

    async def works_on() -> Answer:
        async with asyncio.TaskGroup() as tasks:
            served = tasks.create_task(it.served(2, 0.0, over))
            await eventually(lambda: it.returned, "its lease goes back", within_s=30.0)
            over.touch()
        return served.result()

    with gateway_like(tmp_path, 0.0) as it:
        for _ in range(5):
            assert it.call(2).used == it.used
        assert it.returned == []
        sixth = it.node.do(works_on())
        assert sixth.right
        assert sixth.used == it.used
        assert it.returned == [sixth.lease]
        wait_until(it.all_ended_once, "each lease has ended once")


def test_request_comes_back_when_it_makes_a_further_call(tmp_path: Path) -> None:
    with gateway_like(tmp_path, 0.0) as it:
        for _ in range(5):
            it.call()
        further = it.call(3)
        assert further.right
        assert it.returned == [further.lease]
        assert it.granted[further.request] == 2
        for _ in range(9):
            assert it.call().right
        assert len(it.returned) == 1  # twice as many have to be alike now
        wait_until(it.all_ended_once, "each lease has ended once")
        wait_until(lambda: it.node.leases() == 0, "no lease is left")


def test_answers_are_right_when_some_requests_of_many_make_further_calls(tmp_path: Path) -> None:
    chance = random.Random(7)
    with gateway_like(tmp_path, 0.002) as it:

        async def caller() -> None:
            for number in range(24):
                calls = 1 if number < 6 or chance.random() < 0.8 else 2
                assert (await it.served(calls, 0.005)).right

        async def callers() -> None:
            await asyncio.gather(*(caller() for _ in range(5)))

        it.node.do(callers())
        assert it.returned
        assert max(it.granted.values()) == 2
        wait_until(it.all_ended_once, "each lease has ended once")
        wait_until(lambda: it.node.leases() == 0, "no lease is left")
