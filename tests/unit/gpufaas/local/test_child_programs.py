"""Child processes end when whoever runs them ends."""

import asyncio
import signal

import pytest

from gpufaas.child_programs import killed_at_end


async def test_child_has_ended_when_its_block_is_cancelled() -> None:
    child = await asyncio.create_subprocess_exec("sleep", "1000")

    async def block() -> None:
        async with killed_at_end(child):
            await child.wait()

    running = asyncio.create_task(block())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert child.returncode == -signal.SIGKILL


async def test_child_keeps_its_exit_status_when_it_ends_in_the_block() -> None:
    child = await asyncio.create_subprocess_exec("sh", "-c", "exit 3")
    async with killed_at_end(child):
        await child.wait()
    assert child.returncode == 3
