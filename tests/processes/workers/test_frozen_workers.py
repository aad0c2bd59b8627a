"""Stopped and hanging workers and fork servers are found and replaced; busy ones are left alone."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from common.liveness import LivenessTimes
from gpu_manager.runtimes.runtime import Emulation, HostedModel
from tests.kit.processes.fork_servers import server_pid
from tests.kit.processes.stopped_process import stop
from tests.kit.worlds.caller import Caller, program, step
from tests.kit.worlds.worker_machine import (
    LONG,
    Machine,
    children_of,
    pid_of,
    until_it_computes,
)
from torch_shim.errors import ConnectionLost
from torch_shim.wire.programs import Ref

DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
# Whoever looks too late was held up itself, as long as a process may be blocked here.
SOON = LivenessTimes(look_s=0.05, ask_s=0.05, stopped_s=0.3, blocked_s=0.3, late_s=0.1)


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(SOON)
    yield machine
    machine.run(machine.runtime.close())
    os.close(machine.image)
    machine.runner.close()


def doubled(machine: Machine, hosted: HostedModel) -> list[float]:
    machine.admit(hosted)
    with machine.connect(hosted) as caller:
        found: list[float] = machine.call(caller, DOUBLE, torch.ones(2)).outputs[0].tolist()
    return found


def test_stopped_worker_is_killed_under_a_waiting_call(machine: Machine) -> None:
    hosted = machine.load()
    machine.admit(hosted)
    with machine.connect(hosted) as caller:
        machine.call(caller, DOUBLE, torch.ones(2))
        stop(pid_of(hosted))
        with pytest.raises(ConnectionLost):
            machine.call(caller, DOUBLE, torch.ones(2))
    machine.until(hosted.closed.done, "its end is known")
    ((_, cause),) = machine.watcher.deaths
    assert "stopped by a signal" in cause


def test_stopped_worker_is_replaced_when_its_lease_is_ended(machine: Machine) -> None:
    hosted = machine.load()
    machine.admit(hosted)
    stop(pid_of(hosted))
    machine.run(asyncio.wait_for(hosted.end(7, grace_s=0.2), 60))
    assert hosted.closed.done()
    assert len(machine.watcher.deaths) == 1
    assert doubled(machine, machine.load()) == [2.0, 2.0]


def test_worker_that_hangs_under_a_lease_is_killed(machine: Machine) -> None:
    hosted = machine.load()
    machine.admit(hosted)
    hangs = _silenced(hosted)
    machine.until(hosted.closed.done, "its end is known")
    hangs.set()
    ((_, cause),) = machine.watcher.deaths
    assert "neither answered nor computed" in cause


def _silenced(hosted: HostedModel) -> threading.Event:
    """Have the worker's sign of life never come, as of one whose threads wait for each other."""
    worker = hosted.worker  # type: ignore[attr-defined]  # of this runtime's models
    send_now = worker.send_now
    released = threading.Event()

    def send(order: object, descriptors: object = ()) -> None:
        if released.is_set():
            send_now(order, descriptors)

    worker.send_now = send
    return released


def test_worker_lives_while_it_computes_or_waits_for_a_gpu_for_long(machine: Machine) -> None:
    hosted = machine.load(emulation=Emulation(run_s=1.2))  # four times as long as a hung one has
    other = machine.load(model="n")
    for one in (hosted, other):
        machine.admit(one)

    async def both(waits: Caller, computes: Caller) -> None:
        await asyncio.to_thread(computes.define, LONG)
        computing = asyncio.create_task(asyncio.to_thread(computes.call, LONG, 0))
        await until_it_computes(other)
        await asyncio.to_thread(waits.call, DOUBLE, torch.ones(2))
        assert machine.watcher.deaths == []
        await other.unload()
        with pytest.raises(ConnectionLost):
            await computing

    with machine.connect(hosted) as waits, machine.connect(other) as computes:
        machine.run(both(waits, computes))


def test_stopped_spare_is_replaced_when_a_model_would_be_loaded_in_it(machine: Machine) -> None:
    machine.until(lambda: machine.runtime.spares["cpu"] == 1, "there is a spare")
    (spare,) = machine.runtime.spare_workers("cpu")
    stop(spare.pid)
    hosted = machine.load()
    assert pid_of(hosted) != spare.pid
    assert doubled(machine, hosted) == [2.0, 2.0]


def test_runner_dead_right_after_its_load_is_not_shown_as_loaded_and_another_one_serves(
    machine: Machine,
) -> None:
    hosted = machine.load()
    os.kill(pid_of(hosted), signal.SIGKILL)
    machine.until(hosted.closed.done, "its end is known")
    assert hosted not in machine.runtime.hosted
    assert len(machine.watcher.deaths) == 1
    again = machine.load()
    assert doubled(machine, again) == [2.0, 2.0]


def test_stopped_fork_server_is_replaced_when_a_worker_is_needed(machine: Machine) -> None:
    machine.until(lambda: machine.runtime.spares["cpu"] == 1, "there is a spare")
    server = server_pid(machine.runtime)
    assert server is not None
    stop(server)
    hosted = [machine.load(model=name) for name in ("m", "n")][-1]
    assert server_pid(machine.runtime) not in {None, server}
    assert not children_of(server)
    assert doubled(machine, hosted) == [2.0, 2.0]
