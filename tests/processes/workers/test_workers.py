"""Real worker processes: loaded, called, limited, killed in every way, and gone afterwards."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_manager.errors import LoadFailure
from gpu_manager.runtimes.fork_client import ForkedWorker
from gpu_manager.runtimes.runtime import Emulation, PressureAnswer
from gpu_manager.worker.orders import Admission
from tests.kit.processes.fork_servers import server_pid
from tests.kit.waiting import PATIENCE_S, eventually
from tests.kit.worlds.caller import Caller, CallFailed, program, step, weight
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


@pytest.fixture(scope="module")
def _machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    server = server_pid(machine.runtime)  # to see it gone
    assert server is not None
    machine.run(machine.runtime.close())
    assert not children_of(server)
    assert not Path(f"/proc/{server}").exists()
    os.close(machine.image)
    machine.runner.close()


@pytest.fixture
def machine(_machine: Machine) -> Iterator[Machine]:
    """The machine, which every test must leave with as many processes as it found."""
    watcher = _machine.watcher
    watcher.runs, watcher.deaths, watcher.pressures, watcher.claims = [], [], [], []
    yield _machine
    for hosted in _machine.runtime.hosted:  # whatever the test left
        _machine.run(hosted.unload())
    server = server_pid(_machine.runtime)  # as above
    assert server is not None
    _machine.until(
        lambda: len(children_of(server)) == _machine.runtime.spares["cpu"], "spares alone are left"
    )


def test_model_answers_when_it_was_loaded(machine: Machine) -> None:
    hosted = machine.load()
    assert hosted.load_s > 0
    assert machine.total <= hosted.memory_bytes < machine.total + (64 << 20)
    machine.admit(hosted)
    with machine.connect(hosted) as caller:
        described = weight(machine.table, 0, machine.weights)
        reply = machine.call(caller, DOUBLE, described)
    assert torch.equal(reply.outputs[0], machine.weights * 2)
    machine.until(lambda: machine.watcher.runs, "the run is reported")
    ((lease, batch, run_s, peak_bytes),) = machine.watcher.runs
    assert (lease, batch) == (7, 0)
    assert run_s > 0
    assert peak_bytes >= machine.total + (4 << 20)
    assert machine.watcher.deaths == []


def test_first_session_to_call_under_a_functions_lease_is_named(machine: Machine) -> None:
    hosted = machine.load()
    machine.admit(hosted, session="f")  # the function of all channels here
    with machine.connect(hosted) as caller:
        for _ in range(2):
            machine.call(caller, DOUBLE, torch.ones(1))
    machine.until(lambda: machine.watcher.claims, "the claim is reported")
    assert machine.watcher.claims == [(7, "s")]


def test_weights_in_the_store_are_untouched_when_a_program_writes_to_them(
    machine: Machine,
) -> None:
    hosted = machine.load()
    machine.admit(hosted)
    clear = program(step("m:zero_", Ref(0)), output=[])
    with machine.connect(hosted) as caller:
        machine.call(caller, clear, weight(machine.table, 0, machine.weights))
    stored = torch.frombuffer(bytearray(os.pread(machine.image, 64, 4)), dtype=torch.float32)
    assert torch.equal(stored, machine.weights[1:17])


def test_lease_ends_at_once_when_no_call_is_in_flight(machine: Machine) -> None:
    hosted = machine.load()
    machine.admit(hosted, 1)
    machine.admit(hosted, 2)
    with machine.connect(hosted) as caller:
        machine.call(caller, DOUBLE, torch.ones(2), lease=1)
        machine.run(hosted.end(1))
        with pytest.raises(CallFailed) as failed:
            machine.call(caller, DOUBLE, torch.ones(2), lease=1)
        assert failed.value.failure == "lease not in force"
        machine.call(caller, DOUBLE, torch.ones(2), lease=2)
    machine.run(hosted.end(99))
    assert machine.watcher.deaths == []


def test_lease_ends_with_its_call_when_one_is_in_flight(machine: Machine) -> None:
    hosted = machine.load(emulation=Emulation(run_s=0.4))

    async def is_answered(caller: Caller, lease: int) -> bool:
        """Whether a call is answered whose lease ends when it has come."""
        hosted.admit(
            Admission(lease, "f")
        )  # for the function, so that the worker says when it has come
        calling = asyncio.create_task(
            asyncio.to_thread(caller.call, DOUBLE, torch.ones(2), lease=lease)
        )
        await eventually(lambda: (lease, "s") in machine.watcher.claims, "the call has come")
        await hosted.end(lease, grace_s=PATIENCE_S)
        try:
            await calling
        except CallFailed as refused:
            if refused.failure != "lease not in force":
                raise
            return False  # it had come, but did not run yet
        return True

    async def scene(caller: Caller) -> None:
        for lease in range(7, 107):
            if await is_answered(caller, lease):
                return
        pytest.fail("every call was refused")

    with machine.connect(hosted) as caller:
        machine.run(scene(caller))
    assert machine.watcher.runs
    assert machine.watcher.deaths == []


def test_worker_says_how_long_calls_ran_when_it_is_asked_and_at_the_leases_end(
    machine: Machine,
) -> None:
    hosted, computed_s = machine.load(), machine.watcher.computed_s
    computed_s.clear()
    machine.admit(hosted, 1)
    with machine.connect(hosted) as caller:
        machine.call(caller, DOUBLE, torch.ones(2), lease=1)

        machine.run(hosted.heard())
        assert computed_s == {}, "nobody has asked for it"

        async def say() -> bool:
            """The answer may overtake the worker's note that the call is over."""
            hosted.ask_computed(1)
            await hosted.heard()
            return computed_s.get(1, 0.0) > 0

        machine.run(eventually(say, "it has said so"))
        assert set(computed_s) == {1}
        machine.admit(hosted, 2)
        machine.call(caller, DOUBLE, torch.ones(2), lease=2)
        machine.run(hosted.end(2))
    assert set(computed_s) == {1, 2}
    assert all(seconds > 0 for seconds in computed_s.values())


def test_worker_is_killed_when_a_call_outlives_its_grace(machine: Machine) -> None:
    hosted = machine.load()
    machine.admit(hosted)

    async def scene(caller: Caller) -> None:
        await asyncio.to_thread(caller.define, LONG)
        calling = asyncio.create_task(asyncio.to_thread(caller.call, LONG, 0))
        await until_it_computes(hosted)
        await hosted.end(7, grace_s=0.1)
        with pytest.raises(ConnectionLost):
            await calling

    with machine.connect(hosted) as caller:
        machine.run(scene(caller))
    assert hosted.closed.done()
    ((model, cause),) = machine.watcher.deaths
    assert model == "m"
    assert "outlived its grace" in cause


def test_every_end_is_answered_when_many_ask_about_one_lease(machine: Machine) -> None:
    hosted = machine.load()

    async def ask(rounds: int) -> None:
        for _ in range(rounds):
            await hosted.end(0, grace_s=PATIENCE_S)

    async def scene() -> None:
        await asyncio.gather(*(ask(rounds) for rounds in range(40, 72)))

    machine.run(scene())
    assert not hosted.closed.done()
    assert machine.watcher.deaths == []


def test_worker_lives_when_it_is_the_manager_that_was_held_up(machine: Machine) -> None:
    hosted: Any = machine.load()
    machine.admit(hosted)

    async def scene() -> None:
        ending = asyncio.create_task(hosted.end(7, grace_s=0.1))
        await asyncio.sleep(0)  # the order is on its way
        # Nothing runs here meanwhile, and nobody reads the answer: that is the point.
        assert select.select([hosted.worker.stream.socket], [], [], PATIENCE_S)[0]
        time.sleep(0.4)
        await ending

    machine.run(scene())
    assert not hosted.closed.done()
    assert machine.watcher.deaths == []


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
@pytest.mark.parametrize("when", ["before a call", "in a call"])
def test_death_is_reported_when_a_signal_ends_the_worker(
    machine: Machine, number: int, when: str
) -> None:
    hosted = machine.load()
    machine.admit(hosted)

    async def scene(caller: Caller) -> None:
        calling = None
        if when == "in a call":
            await asyncio.to_thread(caller.define, LONG)
            calling = asyncio.create_task(asyncio.to_thread(caller.call, LONG, 0))
            await until_it_computes(hosted)
        os.kill(pid_of(hosted), number)
        await asyncio.wait_for(asyncio.shield(hosted.closed), 60)
        if calling is not None:
            with pytest.raises(ConnectionLost):
                await calling
        await hosted.end(7)
        hosted.admit(Admission(8, "s"))
        hosted.limit(5)

    with machine.connect(hosted) as caller:
        machine.run(scene(caller))
    assert [model for model, _ in machine.watcher.deaths] == ["m"]
    again = machine.load()
    assert again.id != hosted.id


def test_worker_exits_when_its_orders_are_cut(machine: Machine) -> None:
    hosted: Any = machine.load()
    machine.admit(hosted)

    async def scene(caller: Caller) -> None:
        await asyncio.to_thread(caller.define, LONG)
        calling = asyncio.create_task(asyncio.to_thread(caller.call, LONG, 0))
        await until_it_computes(hosted)
        hosted.worker.stream.socket.shutdown(socket.SHUT_RDWR)  # as a dead manager
        await asyncio.wait_for(asyncio.shield(hosted.worker.exited), 60)  # as above
        with pytest.raises(ConnectionLost):
            await calling

    with machine.connect(hosted) as caller:
        machine.run(scene(caller))


def test_workers_are_gone_when_the_fork_server_is_killed(machine: Machine) -> None:
    hosted = machine.load()
    server = server_pid(machine.runtime)  # the victim
    assert server is not None
    os.kill(server, signal.SIGKILL)
    machine.run(asyncio.wait_for(asyncio.shield(hosted.closed), 60))
    assert len(machine.watcher.deaths) == 1
    again = machine.load()
    machine.admit(again)
    with machine.connect(again) as caller:
        assert machine.call(caller, DOUBLE, torch.ones(2)).outputs[0].tolist() == [2.0, 2.0]
    assert server_pid(machine.runtime) != server  # the new one


def test_spare_is_replaced_when_it_was_taken_or_died(machine: Machine) -> None:
    def spares() -> Sequence[ForkedWorker]:
        return machine.runtime.spare_workers("cpu")

    machine.until(lambda: bool(spares()), "a spare")
    ready = {spare.pid for spare in spares()}
    assert pid_of(machine.load()) in ready
    machine.until(lambda: bool(spares()), "another spare")
    victim = spares()[0]
    os.kill(victim.pid, signal.SIGKILL)
    machine.until(lambda: victim not in spares(), "its end")
    machine.until(lambda: bool(spares()), "the next spare")
    assert victim not in spares()


def test_unload_gives_back_what_was_measured_when_a_call_runs(machine: Machine) -> None:
    hosted = machine.load()
    machine.admit(hosted)

    async def scene(caller: Caller) -> int:
        await asyncio.to_thread(caller.define, LONG)
        calling = asyncio.create_task(asyncio.to_thread(caller.call, LONG, 0))
        await until_it_computes(hosted)
        freed_bytes = await hosted.unload()
        with pytest.raises(ConnectionLost):
            await calling
        return freed_bytes

    with machine.connect(hosted) as caller:
        assert machine.run(scene(caller)) >= machine.total
    assert machine.watcher.deaths == []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{pid_of(hosted)}/status").read_text()
        assert "VmRSS" not in status  # a zombie has no memory


def test_call_goes_on_when_pressure_was_relieved(machine: Machine) -> None:
    what = program(step("m:repeat", Ref(0), 1 << 20), step("m:sum", Ref(1)), output=[Ref(2)])
    hosted = machine.load(limit_bytes=machine.total + (32 << 20))
    machine.admit(hosted)
    with machine.connect(hosted) as caller:
        machine.watcher.relief = PressureAnswer(machine.total + (32 << 20), retry=False)
        with pytest.raises(CallFailed) as failed:
            machine.call(caller, what, torch.ones(16))
        assert failed.value.failure == "out of memory"
        ((lease, need_bytes),) = machine.watcher.pressures
        assert lease == 7
        assert need_bytes > machine.total + (60 << 20)
        machine.watcher.relief = PressureAnswer(machine.total + (256 << 20), retry=True)
        reply = machine.call(caller, what, torch.ones(16))
        assert reply.outputs[0].item() == 16 << 20
        assert machine.call(caller, DOUBLE, torch.ones(1)).outputs[0].item() == 2.0
    assert len(machine.watcher.pressures) == 2


def test_limit_counts_from_the_next_call_when_it_shrinks(machine: Machine) -> None:
    what = program(step("m:repeat", Ref(0), 1 << 20), step("m:sum", Ref(1)), output=[Ref(2)])
    hosted = machine.load()
    machine.admit(hosted)
    machine.watcher.relief = PressureAnswer(machine.total, retry=False)

    async def shrink() -> None:
        hosted.limit(machine.total + (16 << 20))

    with machine.connect(hosted) as caller:
        machine.call(caller, what, torch.ones(16))
        machine.run(shrink())

        async def is_refused() -> bool:
            try:
                await asyncio.to_thread(caller.call, what, torch.ones(16))
            except CallFailed as error:
                return error.failure == "out of memory"
            return False  # the worker has not read the order yet

        machine.until(is_refused, "a call is refused under the smaller limit")


def test_times_are_at_least_the_emulated_ones_when_some_were_given(machine: Machine) -> None:
    hosted = machine.load(emulation=Emulation(load_s=0.3, run_s=0.2))
    assert hosted.load_s >= 0.3
    machine.admit(hosted)
    with machine.connect(hosted) as caller:
        reply = machine.call(caller, DOUBLE, torch.ones(2))
    assert reply.meta.times[2] >= 0.2


def test_load_fails_clearly_when_the_image_is_none(machine: Machine) -> None:
    reading, writing = os.pipe()
    with pytest.raises(LoadFailure):
        machine.load(image=reading)
    os.close(reading)
    os.close(writing)
    assert machine.watcher.deaths == []


def test_sessions_are_apart_when_two_models_are_loaded(machine: Machine) -> None:
    one, other = machine.load(model="one"), machine.load(model="other")
    assert pid_of(one) != pid_of(other)
    for hosted in (one, other):
        machine.admit(hosted)
        with machine.connect(hosted) as caller:
            machine.call(caller, DOUBLE, torch.ones(2))


def test_descriptors_are_as_before_when_models_came_and_went(machine: Machine) -> None:
    looks: list[int] = []

    def held() -> int:
        return machine.descriptors() - machine.runtime.spares["cpu"] * 2

    def rests() -> bool:  # a worker's descriptors are closed a moment after its end
        looks.append(held())
        return bool(machine.runtime.spares["cpu"]) and len(looks) > 9 and len({*looks[-9:]}) == 1

    machine.run(machine.load().unload())
    machine.until(rests, "the pool is filled again")
    before = held()
    for _ in range(3):
        hosted = machine.load()
        machine.admit(hosted)
        with machine.connect(hosted) as caller:
            machine.call(caller, DOUBLE, torch.ones(2))
        machine.run(hosted.unload())
    # What was held before may have been more: that of a spare that was made or ended just then.
    machine.until(lambda: held() <= before, "no more descriptors than before")


def test_channel_closes_and_the_worker_goes_on_when_a_shim_talks_nonsense(
    machine: Machine,
) -> None:
    hosted = machine.load()
    machine.admit(hosted)
    with machine.connect(hosted) as caller:
        caller.wire.socket.sendall(b"nonsense" * 10)
        with pytest.raises(ConnectionLost):
            caller.wire.receive()
    with machine.connect(hosted) as caller:
        assert machine.call(caller, DOUBLE, torch.ones(2)).outputs[0].tolist() == [2.0, 2.0]


def test_worker_holds_little_of_its_own_when_it_waits(machine: Machine) -> None:
    hosted = machine.load()
    descriptors = [link.readlink() for link in Path(f"/proc/{pid_of(hosted)}/fd").iterdir()]
    kinds = [str(link).partition(":")[0] for link in descriptors]
    assert kinds.count("socket") == 1
    assert kinds.count("/dev/null") == 3
