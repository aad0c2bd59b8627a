"""A session has no more channels to a worker than it may; the worker and other sessions go on."""

import os
from contextlib import ExitStack

import pytest
import torch

from gpu_manager.worker.program.inputs import MOST_CHANNELS
from tests.kit.worlds.caller import program, step
from tests.kit.worlds.worker_machine import Machine
from torch_shim.errors import ConnectionLost
from torch_shim.wire.programs import Ref

DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])


def test_channel_beyond_the_limit_is_closed_and_all_others_serve() -> None:
    machine = Machine()
    hosted = machine.load()
    machine.admit(hosted, 7, "s")
    machine.admit(hosted, 8, "other")
    with ExitStack() as kept:
        first, *_ = [kept.enter_context(machine.connect(hosted)) for _ in range(MOST_CHANNELS)]
        with machine.connect(hosted) as refused, pytest.raises(ConnectionLost):
            machine.call(refused, DOUBLE, torch.ones(1))
        machine.call(first, DOUBLE, torch.ones(1), lease=7)
        with machine.connect(hosted, "other") as other:
            machine.call(other, DOUBLE, torch.ones(1), lease=8)
    assert machine.watcher.deaths == []
    machine.run(machine.runtime.close())
    os.close(machine.image)
    machine.runner.close()
