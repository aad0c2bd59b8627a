"""When a manager prepares its workers: at its start, or for the first program that needs them."""

import asyncio

import pytest

from gpu_manager.credentials import ADMINISTRATOR
from gpu_manager.runtimes.runtime import Preparation
from tests.kit.nodes.manager_client import ManagerRefused, manager

pytestmark = pytest.mark.timeout(180, func_only=True)


async def test_workers_are_prepared_when_the_manager_starts() -> None:
    async with manager() as it:
        assert it.runtime.prepared == 1
        await it.client()
        assert it.runtime.prepared == 1


async def test_workers_are_prepared_for_the_first_shim_alone_when_told_so() -> None:
    async with manager(prepare_at_start=False) as it:
        stranger, administrator = await it.stranger(), await it.stranger()
        with pytest.raises(ManagerRefused):
            await stranger.hello("team/function:" + "0" * 64)
        await administrator.hello(it.node.manager.credentials.issue(ADMINISTRATOR), role="admin")
        assert it.runtime.prepared == 0

        await asyncio.gather(*(it.client(f"f{number}") for number in range(20)))

        assert it.runtime.prepared == 1


async def test_workers_are_prepared_once_there_is_a_runtime_when_a_shim_came_before() -> None:
    async with manager(prepare_at_start=False) as it:
        preparation = Preparation(at_start=False)
        preparation.need()
        preparation.need()
        assert it.runtime.prepared == 0

        preparation.start(it.runtime)
        preparation.need()

        assert it.runtime.prepared == 1
