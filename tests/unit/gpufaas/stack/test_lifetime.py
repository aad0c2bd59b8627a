"""The lifetime of a stack: signals end its parts in order."""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from gpufaas.daemon_process import run_until_signal
from gpufaas.stack.supervisor import Part, Supervisor

# A part that takes its time to end, as a gateway does that has calls in flight.
SLOW_TO_END = """
import pathlib, signal, sys, time
path = pathlib.Path(sys.argv[1])
def end(*_):
    time.sleep(float(sys.argv[2]))
    with path.with_name("ended").open("a") as file:
        file.write(path.name + " ")
    sys.exit()
signal.signal(signal.SIGTERM, end)
path.touch()
time.sleep(60)
"""


def part(folder: Path, name: str, takes_s: float) -> Part:
    path = folder / name

    async def ready() -> bool:
        return path.exists()

    command = (sys.executable, "-c", SLOW_TO_END, str(path), str(takes_s))
    return Part(name, command, folder / "log", ready, {})


def test_parts_end_in_their_own_time_last_one_first_when_a_signal_comes(tmp_path: Path) -> None:
    async def work() -> int:
        async with Supervisor(logging.getLogger(__name__)) as supervisor:
            for name, takes_s in (("scheduler", 0.1), ("node", 0.1), ("gateway", 1.5)):
                await supervisor.start(part(tmp_path, name, takes_s))
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.get_running_loop().create_future()
        return 1

    assert asyncio.run(run_until_signal(work())) == 0
    assert (tmp_path / "ended").read_text().split() == ["gateway", "node", "scheduler"]


def test_result_is_that_of_the_work_when_no_signal_comes() -> None:
    async def work() -> int:
        return 3

    assert asyncio.run(run_until_signal(work())) == 3
