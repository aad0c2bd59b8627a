"""What is left of workers and their models: nothing, also before the garbage collector runs."""

import os
import signal

import pytest

from tests.kit.without_collector import without_collector
from tests.kit.worlds.worker_machine import Machine, pid_of

TIMES = 4


@pytest.mark.parametrize("how", ["unloaded", "killed", "emptied"])
def test_nothing_is_left_of_workers_that_have_ended(how: str) -> None:
    machine = Machine()

    def load_and_end() -> None:
        hosted = machine.load()
        if how == "killed":
            os.kill(pid_of(hosted), signal.SIGKILL)
            machine.until(hosted.closed.done, "the worker's end is noticed")
        elif how == "emptied":
            left = machine.run(hosted.empty())
            assert left is not None
            machine.run(left.end())
        else:
            machine.run(hosted.unload())

    load_and_end()
    try:
        with without_collector() as garbage:
            for _ in range(TIMES):
                load_and_end()
            assert garbage() < TIMES
    finally:
        machine.run(machine.runtime.close())
        os.close(machine.image)
        machine.runner.close()
