"""A frozen part of a stack is killed and started again."""

import asyncio
import logging
from asyncio.subprocess import Process
from pathlib import Path
from typing import cast

import pytest

from common.liveness import LivenessTimes
from gpufaas.stack.supervisor import Supervisor, until_ended
from tests.kit.processes.stopped_process import stop
from tests.kit.waiting import eventually
from tests.unit.gpufaas.stack.toy_parts import alive, at_once, noting, part, pids

LOG = logging.getLogger(__name__)
# Whoever looks too late was held up itself, as long as a process may be blocked here.
SOON = LivenessTimes(look_s=0.05, ask_s=0.05, stopped_s=0.3, blocked_s=0.3, late_s=0.1)


async def test_frozen_part_is_killed_and_started_again_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Supervisor(LOG, SOON) as supervisor:
        await supervisor.start(part(tmp_path, noting(tmp_path, "time.sleep(60)")))
        await eventually(lambda: len(pids(tmp_path)) == 1)
        stop(pids(tmp_path)[0])
        await eventually(lambda: len(pids(tmp_path)) == 2)
        assert not alive(pids(tmp_path)[0])
    assert "toy was stopped by a signal" in caplog.text


async def test_part_that_hangs_after_it_answered_is_killed_and_started_again(
    tmp_path: Path,
) -> None:
    async def answers() -> bool:
        return not (tmp_path / "hangs").exists()

    toy = part(tmp_path, noting(tmp_path, "time.sleep(60)"), at_once, answers=answers)
    async with Supervisor(LOG, SOON) as supervisor:
        await supervisor.start(toy)
        await eventually(lambda: len(pids(tmp_path)) == 1)
        await asyncio.sleep(2 * SOON.blocked_s)
        assert len(pids(tmp_path)) == 1  # it answers, though it does nothing else
        (tmp_path / "hangs").touch()
        await eventually(lambda: len(pids(tmp_path)) == 2)


async def test_frozen_part_is_woken_to_end_by_itself_when_the_stack_ends(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    ending = f"""
import signal
def end(*_):
    open({str(ended)!r}, "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
open({str(tmp_path / "set")!r}, "w").close()
time.sleep(60)
"""
    async with Supervisor(LOG) as supervisor:
        await supervisor.start(part(tmp_path, noting(tmp_path, ending), stop_s=30.0))
        await eventually((tmp_path / "set").exists)
        stop(pids(tmp_path)[0])
    assert ended.exists()


class EndsByItself:
    """What is known of a process with this pid; once it has ended it cannot be killed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = asyncio.Event()

    async def wait(self) -> int | None:
        await self.ended.wait()
        return self.returncode

    def kill(self) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        raise AssertionError("it was killed before it ended")


async def test_part_that_ends_as_it_is_found_frozen_has_ended_by_itself(tmp_path: Path) -> None:
    async with Supervisor(LOG) as supervisor:
        await supervisor.start(part(tmp_path, noting(tmp_path, "time.sleep(60)")))
        await eventually(lambda: len(pids(tmp_path)) == 1)
        found = EndsByItself(pids(tmp_path)[0])
        stop(found.pid)

        async def answers() -> bool:
            try:
                await asyncio.Event().wait()
            finally:  # nobody asks any more: it has been found frozen
                found.returncode = 3
                found.ended.set()
            return False

        why = await until_ended(cast(Process, found), answers, SOON, found.kill)
    assert why == "ended with status 3"
