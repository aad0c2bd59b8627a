"""Real workers that models leave: what stays, what takes them, and how they end."""

import asyncio
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_manager.devices.gpu_turns import make_turns
from gpu_manager.runtimes.hosting_worker import EmptiedWorker
from gpu_manager.runtimes.runtime import EmptyHost, HostedModel
from gpu_manager.worker.orders import Admission
from tests.kit.nodes.worker_client import alive
from tests.kit.processes.fork_servers import server_pid
from tests.kit.processes.stopped_process import stop
from tests.kit.waiting import PATIENCE_S
from tests.kit.worlds.caller import (
    Caller,
    CallFailed,
    program,
    sealed_image,
    step,
    weight,
)
from tests.kit.worlds.worker_machine import (
    LONG,
    Machine,
    children_of,
    pid_of,
    until_it_computes,
)
from torch_shim.errors import ConnectionLost
from torch_shim.wire.programs import Ref
from torch_shim.wire.protocol import FrameKind

DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
MIB = 1 << 20
# A worker without a model that ran calls keeps some pages of malloc and of torch's own.
LITTLE_BYTES = 24 * MIB


@pytest.fixture(scope="module")
def _machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    server = server_pid(machine.runtime)  # to see it gone
    assert server is not None
    machine.run(machine.runtime.close())
    assert not children_of(server)
    os.close(machine.image)
    machine.runner.close()


@pytest.fixture
def machine(_machine: Machine) -> Iterator[Machine]:
    """The machine, which every test must leave with as many processes as it found."""
    watcher = _machine.watcher
    watcher.deaths, watcher.lost = [], []
    yield _machine
    for hosted in _machine.runtime.hosted:
        _machine.run(hosted.unload())
    for empty in _machine.runtime.empty:
        _machine.run(empty.end())
    server = server_pid(_machine.runtime)
    assert server is not None
    _machine.until(
        lambda: len(children_of(server)) == _machine.runtime.spares["cpu"], "spares alone are left"
    )


def emptied(machine: Machine, hosted: HostedModel) -> EmptyHost:
    """What is left of a model's process, which must be kept."""
    left = machine.run(hosted.empty())
    assert left is not None
    assert left.host == hosted.host
    return left


def of_host(pid: int, what: str) -> int:
    """Bytes of a process, as /proc names them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith(what)]
    return int(found.split()[1]) * 1024


def descriptors_of(pid: int) -> list[str]:
    links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()]
    return sorted(str(link).partition(":")[0] for link in links)


def held(machine: Machine) -> int:
    """Our descriptors, but for the two of each spare: a socket, and that of its end."""
    return machine.descriptors() - 2 * machine.runtime.spares["cpu"]


def called(machine: Machine, hosted: HostedModel, *inputs: Any) -> torch.Tensor:
    """The double of the input, or of the model's weights."""
    machine.admit(hosted)
    with machine.connect(hosted) as caller:
        described = inputs or (weight(machine.table, 0, machine.weights),)
        found: torch.Tensor = machine.call(caller, DOUBLE, *described).outputs[0]
    return found


def test_memory_of_weights_outputs_and_calls_is_given_back_when_a_model_leaves(
    machine: Machine,
) -> None:
    large = torch.ones(16 * MIB)  # 64 MiB
    image, table, total = sealed_image(large)
    hosted = machine.load(image=image, table=table, total_bytes=total)
    os.close(image)
    machine.admit(hosted)
    pid = pid_of(hosted)
    with machine.connect(hosted) as caller:
        caller.memory = machine.run(asyncio.to_thread(caller.arena, MIB))
        stays: list[Any] = [None, None, [], None, "", None, [100, 0, {}, []]]
        machine.call(caller, DOUBLE, weight(table, 0, large), options=stays)
        assert of_host(pid, "RssAnon") >= 64 * MIB
        assert of_host(pid, "RssShmem") >= 64 * MIB

        left = emptied(machine, hosted)

        frame = machine.run(asyncio.to_thread(caller.wire.receive))
        assert frame.kind is FrameKind.LEFT
        assert [size for *_, size in frame.meta] == [64 * MIB]
        frame.close_descriptors()
        with pytest.raises(ConnectionLost):
            caller.wire.receive()
    assert hosted.memory_bytes >= 128 * MIB
    assert left.memory_bytes < LITTLE_BYTES
    assert of_host(pid, "RssShmem") < MIB
    assert machine.watcher.deaths == []
    assert hosted.closed.result() == "emptied"


def test_next_model_of_the_tenant_is_loaded_in_the_same_process(machine: Machine) -> None:
    first = machine.load()
    assert torch.equal(called(machine, first), machine.weights * 2)
    left = emptied(machine, first)
    other = torch.full((5,), 3.0)
    image, table, total = sealed_image(other)

    second = machine.load(
        model="n", image=image, table=table, total_bytes=total, digest="e" * 64, emptied=left
    )

    os.close(image)
    assert pid_of(second) == pid_of(first)
    assert second.id != first.id
    assert left.closed.result() == "n has taken it"
    assert machine.runtime.empty == ()
    machine.admit(second)
    with machine.connect(second) as caller:
        with pytest.raises(CallFailed) as failed:  # the former model's weights
            machine.call(caller, DOUBLE, weight(machine.table, 0, machine.weights))
        described = weight(table, 0, other)
        described[0][1] = "e" * 64
        assert machine.call(caller, DOUBLE, described).outputs[0].tolist() == [6.0] * 5
    assert failed.value.failure == "unknown model"


def test_former_leases_and_orders_are_without_effect_when_another_model_came(
    machine: Machine,
) -> None:
    first = machine.load()
    machine.admit(first, 5)
    second = machine.load(model="n", emptied=emptied(machine, first))

    async def late() -> None:
        first.admit(Admission(6, "s"))
        first.limit(1)
        await first.end(5)
        assert await first.unload() >= machine.total

    machine.run(late())
    machine.admit(second, 8)
    with machine.connect(second) as caller:
        for lease in (5, 6):
            with pytest.raises(CallFailed) as failed:
                machine.call(caller, DOUBLE, torch.ones(1), lease=lease)
            assert failed.value.failure == "lease not in force"
        assert machine.call(caller, DOUBLE, torch.ones(1), lease=8).outputs[0].item() == 2.0
    assert not second.closed.done()


def test_next_model_computes_with_torchs_own_settings_when_the_former_had_others(
    machine: Machine,
) -> None:
    what = program(
        step("m:put_", Ref(0), Ref(1), Ref(2)),
        step("o:mul", Ref(3), 2),
        inputs=3,
        output=[Ref(4)],
    )
    inputs = torch.zeros(3), torch.arange(3), torch.ones(3)
    exact: list[Any] = [None, None, [], None, "", ["highest", False, False, True, 2]]
    first = machine.load()
    machine.admit(first)
    with machine.connect(first) as caller, pytest.raises(CallFailed, match="deterministic"):
        machine.call(caller, what, *inputs, options=exact)
    second = machine.load(model="n", emptied=emptied(machine, first))
    machine.admit(second)
    with machine.connect(second) as caller:
        assert machine.call(caller, what, *inputs).outputs[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("change", [{"tenant": "another"}, {"gpu": "g1"}])
def test_process_ends_when_it_is_given_to_another_tenant_or_gpu(
    machine: Machine, change: dict[str, Any]
) -> None:
    left = emptied(machine, machine.load())
    assert left.host is not None

    hosted = machine.load(emptied=left, **change)

    assert pid_of(hosted) != left.host.pid
    assert left.closed.done()
    assert not alive(left.host.pid)
    assert torch.equal(called(machine, hosted), machine.weights * 2)
    assert machine.watcher.lost == []


def test_worker_holds_no_more_than_before_when_models_come_and_go(machine: Machine) -> None:
    turns = make_turns()
    hosted = machine.load(turns=turns)
    called(machine, hosted)
    left = emptied(machine, hosted)
    pid, ours = pid_of(hosted), held(machine)
    theirs, memory_bytes = descriptors_of(pid), of_host(pid, "RssAnon")
    for round_number in range(4):
        hosted = machine.load(model=f"m{round_number}", turns=turns, emptied=left)
        called(machine, hosted)
        called(machine, hosted, torch.ones(1 << 10))
        left = emptied(machine, hosted)
    assert pid_of(hosted) == pid
    assert descriptors_of(pid) == theirs
    assert not any("gpufaas-turns" in name or "image" in name for name in theirs)
    assert of_host(pid, "RssAnon") < memory_bytes + LITTLE_BYTES
    assert left.memory_bytes < LITTLE_BYTES
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert "Max address space         unlimited" in limits
    os.close(turns)
    machine.until(lambda: held(machine) <= ours, "no more descriptors than before")


def test_worker_is_killed_when_a_call_goes_on_for_too_long(machine: Machine) -> None:
    hosted = machine.load()
    machine.admit(hosted)

    async def scene(caller: Caller) -> EmptyHost | None:
        await asyncio.to_thread(caller.define, LONG)
        calling = asyncio.create_task(asyncio.to_thread(caller.call, LONG, 0))
        await until_it_computes(hosted)
        left = await hosted.empty()
        with pytest.raises(ConnectionLost):
            await calling
        return left

    with machine.connect(hosted) as caller:
        assert machine.run(scene(caller)) is None
    assert hosted.closed.done()
    assert machine.watcher.deaths == []
    assert machine.runtime.empty == ()


def test_nothing_is_kept_when_the_worker_is_killed_while_it_is_emptied(machine: Machine) -> None:
    hosted = machine.load()

    async def scene() -> EmptyHost | None:
        stop(pid_of(hosted))  # so that it cannot have carried out the order
        emptying = asyncio.ensure_future(hosted.empty())
        await asyncio.sleep(0)
        os.kill(pid_of(hosted), signal.SIGKILL)
        return await emptying

    assert machine.run(scene()) is None
    assert machine.watcher.deaths == []
    assert machine.watcher.lost == []


def test_worker_that_is_stopped_while_it_is_emptied_is_killed(machine: Machine) -> None:
    hosted = machine.load()
    stop(pid_of(hosted))
    assert machine.run(hosted.empty()) is None
    assert hosted.closed.done()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_empty_worker_that_ends_by_itself_is_reported(machine: Machine, how: str) -> None:
    left = emptied(machine, machine.load())
    assert left.host is not None
    if how == "killed":
        os.kill(left.host.pid, signal.SIGKILL)
    else:
        stop(left.host.pid)
    machine.until(left.closed.done, "its end is known")
    ((lost, cause),) = machine.watcher.lost
    assert lost is left
    assert cause == "it ended" if how == "killed" else "stopped by a signal" in cause
    assert machine.runtime.empty == ()


def test_model_is_loaded_in_another_process_when_the_emptied_one_has_died(
    machine: Machine,
) -> None:
    left = emptied(machine, machine.load())
    assert left.host is not None
    os.kill(left.host.pid, signal.SIGKILL)  # which the runtime has not seen yet

    hosted = machine.load(emptied=left)

    assert pid_of(hosted) != left.host.pid
    assert torch.equal(called(machine, hosted), machine.weights * 2)


def test_empty_worker_is_gone_without_a_report_when_it_is_ended(machine: Machine) -> None:
    left = emptied(machine, machine.load())
    assert left.host is not None
    machine.run(left.end())
    machine.run(left.end())
    assert not alive(left.host.pid)
    assert machine.watcher.lost == []


def test_worker_that_is_ended_before_its_last_answer_is_read_is_no_lost_one(
    machine: Machine,
) -> None:
    hosted = machine.load()
    (model,) = machine.runtime.hosted
    host = model.hosting

    async def scene() -> EmptyHost | None:
        emptying = asyncio.ensure_future(hosted.empty())
        await asyncio.sleep(0)
        # The loop does not run meanwhile: the worker has said that it is empty, and nobody knows.
        assert select.select([host.worker.stream.socket], [], [], PATIENCE_S)[0]
        host.end()
        await host.over
        return await emptying

    assert machine.run(scene()) is None
    assert machine.runtime.empty == ()
    assert machine.watcher.lost == []
    assert machine.watcher.deaths == []


def test_worker_that_is_ended_just_after_its_last_answer_is_no_lost_one(machine: Machine) -> None:
    hosted = machine.load()
    (model,) = machine.runtime.hosted
    host = model.hosting

    async def scene() -> EmptyHost | None:
        hosted.closed.add_done_callback(lambda _: host.end())
        left = await hosted.empty()
        await host.over
        return left

    left = machine.run(scene())
    assert left is not None
    assert left.closed.result() == "the runtime is closed"
    assert machine.watcher.lost == []
    assert machine.watcher.deaths == []


def test_every_process_is_gone_when_the_runtime_closes_while_one_is_emptied() -> None:
    machine = Machine()
    kept = emptied(machine, machine.load())
    hosted = machine.load(model="n")
    server = server_pid(machine.runtime)
    assert server is not None

    async def scene() -> EmptyHost | None:
        emptying = asyncio.ensure_future(hosted.empty())
        await asyncio.sleep(0)
        await machine.runtime.close()
        return await emptying

    left = machine.run(scene())
    assert left is None or left.closed.done()
    assert isinstance(kept, EmptiedWorker)
    assert kept.closed.done()
    assert machine.watcher.lost == []
    assert machine.watcher.deaths == []
    assert not children_of(server)
    os.close(machine.image)
    machine.runner.close()
