"""Models that share a worker: each with its own limit, queue and numbers, whatever others do."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from gpu_manager.errors import LoadFailure
from gpu_manager.runtimes.runtime import Emulation, HostedModel, PressureAnswer
from gpu_manager.runtimes.stream import ChosenRuntime
from tests.kit.waiting import PATIENCE_S
from tests.kit.worlds.caller import (
    Caller,
    CallFailed,
    program,
    raw,
    step,
    weight,
)
from tests.kit.worlds.worker_machine import LONG, Machine, pid_of, until_it_computes
from torch_shim.errors import ConnectionLost
from torch_shim.wire.programs import DeviceName, Named, Program, Ref

MIB = 1 << 20
SLOW_S = 8.0  # longer than a busy machine holds a process up
DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
LARGE = program(
    step("t:torch.ones", [32 * MIB // 4], device=DeviceName("cuda")),
    step("m:sum", Ref(1)),
    output=[Ref(2)],
)
HOLDING = program(
    step("t:torch.ones", [32 * MIB // 4], device=DeviceName("cuda")),
    step("t:torch.ones", [400, 400], device=DeviceName("cuda")),
    *(step("o:matmul", Ref(2), Ref(2 + n)) for n in range(200)),
    step("m:sum", Ref(1)),
    output=[Ref(203)],
)
DRAW = program(
    step("t:torch.rand", [64], device=DeviceName("cuda")), inputs=0, output=[Ref(0)], random=True
)


@pytest.fixture(scope="module")
def _machine() -> Iterator[Machine]:
    machine = Machine()
    machine.chosen = ChosenRuntime(machine.runtime)
    yield machine
    machine.run(machine.runtime.close())
    os.close(machine.image)
    machine.runner.close()


@pytest.fixture
def machine(_machine: Machine) -> Iterator[Machine]:
    watcher = _machine.watcher
    watcher.runs, watcher.deaths, watcher.pressures = [], [], []
    watcher.relief = PressureAnswer(0, retry=False)
    yield _machine
    for hosted in _machine.runtime.hosted:
        _machine.run(hosted.unload())
    _machine.until(lambda: not _machine.runtime.hosted, "no model is left")


def shared(machine: Machine, name: str, **more: object) -> HostedModel:
    """A model in the tenant's process, admitted for its session."""
    hosted = machine.load(model=name, runtime="stream", **more)
    machine.admit(hosted, session=name)
    return hosted


def callers(machine: Machine, stack: ExitStack, *models: HostedModel) -> list[Caller]:
    return [stack.enter_context(machine.connect(model, model.order.model)) for model in models]


def anonymous_bytes(hosted: HostedModel) -> int:
    status = Path(f"/proc/{pid_of(hosted)}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_models_have_one_process_and_accounts_of_their_own(machine: Machine) -> None:
    first, second = shared(machine, "a"), shared(machine, "b")
    assert pid_of(first) == pid_of(second)
    assert first.id != second.id
    assert second.memory_bytes == machine.total  # weights, and nothing of the process
    with ExitStack() as stack:
        one, two = callers(machine, stack, first, second)
        described = weight(machine.table, 0, machine.weights)
        assert torch.equal(machine.call(one, DOUBLE, described).outputs[0], machine.weights * 2)
        machine.until(lambda: bool(machine.watcher.runs), "the first one is reported")
        machine.call(two, LARGE, torch.ones(1))
        machine.until(lambda: len(machine.watcher.runs) == 2, "both are reported")
    (_, _, _, of_first), (_, _, _, of_second) = machine.watcher.runs
    assert machine.total + 4 * MIB <= of_first < machine.total + 5 * MIB
    assert machine.total + 32 * MIB < of_second < machine.total + 33 * MIB


def test_another_tenant_has_another_process(machine: Machine) -> None:
    ours, theirs = shared(machine, "a"), shared(machine, "b", tenant="others")
    assert pid_of(ours) != pid_of(theirs)
    elsewhere = shared(machine, "c", gpu="g1")
    assert pid_of(elsewhere) not in {pid_of(ours), pid_of(theirs)}


def test_calls_of_two_models_run_at_the_same_time(machine: Machine) -> None:
    slow = shared(machine, "slow", emulation=Emulation(run_s=SLOW_S))
    quick = shared(machine, "quick")

    async def scene(one: Caller, two: Caller) -> None:
        calling = asyncio.create_task(asyncio.to_thread(one.call, DOUBLE, torch.ones(2)))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(two.call, DOUBLE, torch.ones(2))
        assert not calling.done()
        await calling

    with ExitStack() as stack:
        machine.run(scene(*callers(machine, stack, slow, quick)))


@pytest.mark.parametrize(
    "absurd",
    [
        program(step("t:torch.zeros", [1 << 60]), step("m:numel", Ref(1)), output=[Ref(2)]),
        program(step("t:torch.empty", [1 << 61], dtype=Named("dtype", "uint8")), output=[1]),
        program(step("m:expand", Ref(0), 1 << 60), output=[Ref(1)]),
        program(step("m:expand", Ref(0), 1 << 60), step("m:squeeze_", Ref(1)), output=[1]),
    ],
    ids=["zeros", "bytes", "an expanded output", "expanded in place"],
)
def test_process_goes_on_when_a_program_asks_for_absurdly_much(
    machine: Machine, absurd: Program
) -> None:
    """And the tenant's other models in it."""
    machine.watcher.relief = PressureAnswer(1 << 30, retry=False)
    first, second = shared(machine, "a"), shared(machine, "b")
    with ExitStack() as stack:
        one, two = callers(machine, stack, first, second)
        for _ in range(6):  # the first reports of what a model uses come with these
            with suppress(CallFailed):
                machine.call(one, absurd, torch.ones(1))
        assert torch.equal(machine.call(one, DOUBLE, torch.ones(2)).outputs[0], torch.ones(2) * 2)
        assert torch.equal(machine.call(two, DOUBLE, torch.ones(2)).outputs[0], torch.ones(2) * 2)
    assert machine.watcher.deaths == []
    assert pid_of(first) == pid_of(second)


def test_random_numbers_are_those_of_each_call_when_two_models_draw(machine: Machine) -> None:
    first, second = shared(machine, "a"), shared(machine, "b")
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(raw(torch.get_rng_state()))
    expected = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected.append(torch.rand(64))

    def draw(caller: Caller, state: bytes, wanted: torch.Tensor) -> None:
        for _ in range(50):
            assert torch.equal(
                caller.call(DRAW, options=(None, state, [], None)).outputs[0], wanted
            )

    async def scene(one: Caller, two: Caller) -> None:
        await asyncio.gather(
            asyncio.to_thread(draw, one, states[0], expected[0]),
            asyncio.to_thread(draw, two, states[1], expected[1]),
        )

    with ExitStack() as stack:
        machine.run(scene(*callers(machine, stack, first, second)))


def test_a_call_that_wants_too_much_fails_alone(machine: Machine) -> None:
    limit_bytes = machine.total + 8 * MIB
    machine.watcher.relief = PressureAnswer(limit_bytes, retry=False)
    small = shared(machine, "small", limit_bytes=limit_bytes)
    other = shared(machine, "other")
    with ExitStack() as stack:
        one, two = callers(machine, stack, small, other)
        with pytest.raises(CallFailed) as failed:
            machine.call(one, LARGE, torch.ones(1))
        assert failed.value.failure == "out of memory"
        machine.call(two, LARGE, torch.ones(1))
        assert machine.call(one, DOUBLE, torch.ones(2)).outputs[0].tolist() == [2.0, 2.0]
    assert machine.watcher.deaths == []


def test_calls_that_do_not_fit_together_run_one_after_the_other(machine: Machine) -> None:
    together_bytes = 2 * machine.total + 48 * MIB
    first, second = (shared(machine, name, together_bytes=together_bytes) for name in "ab")

    def several(caller: Caller) -> list[float]:
        caller.define(HOLDING)
        return [float(caller.call(HOLDING, torch.ones(1)).outputs[0]) for _ in range(4)]

    async def scene(one: Caller, two: Caller) -> list[list[float]]:
        return await asyncio.gather(*(asyncio.to_thread(several, each) for each in (one, two)))

    with ExitStack() as stack:
        found = machine.run(scene(*callers(machine, stack, first, second)))
    assert found == [[32 * MIB / 4] * 4] * 2
    assert machine.watcher.pressures == []
    assert machine.watcher.deaths == []


def test_a_call_asks_for_memory_when_it_does_not_fit_beside_what_others_keep(
    machine: Machine,
) -> None:
    small = 2 * machine.total + 8 * MIB
    first, _ = (shared(machine, name, together_bytes=small) for name in "ab")
    with ExitStack() as stack:
        (caller,) = callers(machine, stack, first)
        with pytest.raises(CallFailed) as failed:
            machine.call(caller, LARGE, torch.ones(1))
        assert failed.value.failure == "out of memory"
        assert len(machine.watcher.pressures) == 1
        machine.watcher.relief = PressureAnswer(1 << 30, True, 2 * machine.total + 40 * MIB)
        machine.call(caller, LARGE, torch.ones(1))


def test_a_model_holds_no_memory_of_its_calls_between_them(machine: Machine) -> None:
    model = shared(machine, "m")
    with ExitStack() as stack:
        (caller,) = callers(machine, stack, model)
        machine.call(caller, LARGE, torch.ones(1))
        machine.until(lambda: bool(machine.watcher.runs), "it is reported")
    (_, _, _, peak_bytes) = machine.watcher.runs[-1]
    assert peak_bytes > machine.total + 32 * MIB
    assert machine.total <= machine.watcher.held_bytes < machine.total + MIB


def test_a_share_of_the_gpu_is_so_much_of_its_processors(machine: Machine) -> None:
    whole_s = 0.05
    slow = shared(machine, "slow", gpu_share=0.25, emulation=Emulation(run_s=whole_s))
    other = shared(machine, "other", emulation=Emulation(run_s=whole_s))
    with ExitStack() as stack:
        one, two = callers(machine, stack, slow, other)
        of_slow_s, *of_other_s = [reported_run_s(machine, caller) for caller in (one, *[two] * 10)]
        assert of_slow_s >= 4 * whole_s
        assert whole_s <= min(of_other_s) < 4 * whole_s
        begun_s, before_s = time.monotonic(), processor_s(slow)
        for _ in range(4):
            machine.call(one, HOLDING, torch.ones(1))
        spent_s, took_s = processor_s(slow) - before_s, time.monotonic() - begun_s
    assert spent_s < (0.25 * torch.get_num_threads() + 0.1) * took_s


def reported_run_s(machine: Machine, caller: Caller) -> float:
    """What one call has taken, as the worker reports it."""
    before = len(machine.watcher.runs)
    machine.call(caller, DOUBLE, torch.ones(2))
    machine.until(lambda: len(machine.watcher.runs) > before, "it is reported")
    return machine.watcher.runs[-1][2]


def processor_s(hosted: HostedModel) -> float:
    """What the process has computed, in seconds of one core."""
    fields = Path(f"/proc/{pid_of(hosted)}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_free_pages_are_given_back_a_while_after_the_last_call(machine: Machine) -> None:
    model = shared(machine, "m")
    with ExitStack() as stack:
        (caller,) = callers(machine, stack, model)
        machine.call(caller, DOUBLE, torch.ones(2))
        before = anonymous_bytes(model)
        machine.call(caller, LARGE, torch.ones(1))
        machine.until(lambda: anonymous_bytes(model) < before + 4 * MIB, "the pool has shrunk")


def test_a_model_leaves_while_another_one_computes(machine: Machine) -> None:
    stays = shared(machine, "stays", emulation=Emulation(run_s=SLOW_S))
    goes = shared(machine, "goes")

    async def scene(caller: Caller) -> None:
        calling = asyncio.create_task(asyncio.to_thread(caller.call, DOUBLE, torch.ones(2)))
        await asyncio.sleep(0.1)
        await goes.unload()
        assert goes.closed.done()
        assert not calling.done()
        assert (await calling).outputs[0].tolist() == [2.0, 2.0]

    with ExitStack() as stack:
        machine.run(scene(*callers(machine, stack, stays)))
    assert not stays.closed.done()
    assert machine.watcher.deaths == []


def test_an_empty_process_is_kept_by_the_last_model_alone(machine: Machine) -> None:
    first, last = shared(machine, "first"), shared(machine, "last")
    assert machine.run(first.empty()) is None
    kept = machine.run(last.empty())
    assert kept is not None
    assert kept.host == last.host
    again = shared(machine, "again", emptied=kept)
    assert again.host == last.host
    with ExitStack() as stack:
        (caller,) = callers(machine, stack, again)
        machine.call(caller, DOUBLE, torch.ones(2))


def test_nobody_joins_a_process_that_a_model_has_taken_alone(machine: Machine) -> None:
    kept = machine.run(shared(machine, "first").empty())
    assert kept is not None
    alone = machine.load(model="alone", runtime="process", emptied=kept)
    assert alone.host == kept.host
    other = shared(machine, "other")
    assert other.host != alone.host


def test_models_that_leave_together_take_their_process_with_them(machine: Machine) -> None:
    first, second = shared(machine, "a"), shared(machine, "b")

    async def both() -> None:
        await asyncio.gather(first.unload(), second.unload())

    machine.run(both())
    assert machine.watcher.deaths == []
    assert not machine.runtime.empty
    fresh = shared(machine, "c")
    assert fresh.host != first.host


def test_a_load_that_fails_costs_the_others_nothing(machine: Machine) -> None:
    other = shared(machine, "other")
    beyond = ((0, 1 << 40),)
    with pytest.raises(LoadFailure):
        machine.load(model="bad", runtime="stream", table=beyond, total_bytes=1 << 40)
    with ExitStack() as stack:
        (caller,) = callers(machine, stack, other)
        machine.call(caller, DOUBLE, torch.ones(2))
    machine.until(
        lambda: [model.order.model for model in machine.runtime.hosted] == ["other"],
        "the one that failed has left",
    )
    assert machine.watcher.deaths == []


def test_a_model_that_breaks_its_process_twice_gets_one_of_its_own(machine: Machine) -> None:
    for _ in range(2):
        victim, culprit = shared(machine, "victim"), shared(machine, "culprit")
        machine.run(victim.end(7, grace_s=PATIENCE_S))

        async def scene(caller: Caller, model: HostedModel) -> None:
            await asyncio.to_thread(caller.define, LONG)
            calling = asyncio.create_task(asyncio.to_thread(caller.call, LONG, 0))
            await until_it_computes(model)
            await model.end(7, grace_s=0.1)
            with pytest.raises(ConnectionLost):
                await calling

        with machine.connect(culprit, "culprit") as caller:
            machine.run(scene(caller, culprit))
        assert {name for name, _ in machine.watcher.deaths} == {"victim", "culprit"}
        assert victim.closed.done()
    assert machine.chosen.hosting("stream", "culprit") == "process"
    assert machine.chosen.hosting("stream", "victim") == "stream"
    victim, culprit = shared(machine, "victim"), shared(machine, "culprit")
    assert victim.host != culprit.host


def test_a_process_that_ends_by_order_was_broken_by_nobody(machine: Machine) -> None:
    for _ in range(3):
        model = shared(machine, "in use")
        machine.run(model.unload())
    assert machine.chosen.hosting("stream", "in use") == "stream"
