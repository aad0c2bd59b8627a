"""A worker whose GPU lacks memory, or whose context is lost, in any step of a call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_manager.call_errors import ContextLost, OutOfMemory
from tests.kit.worlds.caller import (
    CallFailed,
    LocalWorker,
    program,
    raw,
    step,
)
from torch_shim.errors import ConnectionLost
from torch_shim.wire.programs import Constant, Ref

MIB = 1 << 20
DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
# Writes to a constant, so that there is something to restore when it has failed.
WRITING = program(
    step("m:add_", Ref(1), Ref(0)),
    constants=(Constant("float32", (4,), raw(torch.zeros(4))),),
    output=[Ref(2)],
)


def losing(detail: str, *, of_program: bool) -> Callable[..., Any]:
    def run(_work: Any, *, measure: bool) -> Any:
        del measure
        raise ContextLost(detail, of_program=of_program)

    return run


def test_worker_ends_without_an_answer_when_the_gpu_is_lost() -> None:
    worker = LocalWorker()
    worker.device.run = losing("an uncorrectable error", of_program=False)  # type: ignore[method-assign]
    with worker.connect() as caller:
        with pytest.raises(ConnectionLost):
            caller.call(DOUBLE, torch.ones(4))
        worker.join()
    assert worker.lost.is_set()
    assert worker.notes == ["the GPU's context is lost: an uncorrectable error"]


def test_function_is_told_when_its_program_has_broken_the_context() -> None:
    worker = LocalWorker()
    worker.device.run = losing("device-side assert", of_program=True)  # type: ignore[method-assign]
    with worker.connect() as caller, pytest.raises(CallFailed) as failed:
        caller.call(DOUBLE, torch.ones(4))
    assert "device-side assert" in failed.value.message
    worker.join()
    assert worker.lost.is_set()


def test_worker_ends_when_restoring_fails_because_the_context_is_lost() -> None:
    worker = LocalWorker()

    def run(work: Callable[[], Any], *, measure: bool) -> Any:
        del measure
        work()
        raise ContextLost("illegal address", of_program=False)

    def fails() -> Any:
        raise RuntimeError("CUDA error: illegal address")

    worker.device.run = run  # type: ignore[method-assign]
    with worker.connect() as caller:
        number = caller.define(WRITING)
        assert number == 1
        (built,) = worker.programs._built.values()  # noqa: SLF001 - the program under test
        built.fresh_constants = fails  # type: ignore[method-assign]
        with pytest.raises(ConnectionLost):
            caller.call(WRITING, torch.ones(4))
        worker.join()
    assert worker.lost.is_set()


@pytest.mark.parametrize("relief", [(None, True), (None, False)])
def test_room_is_made_when_inputs_do_not_fit(relief: tuple[int | None, bool]) -> None:
    worker = LocalWorker()
    worker.relief = relief
    receive, times = worker.device.receive, []

    def short_once(*arguments: Any, **named: Any) -> Any:
        times.append(1)
        if len(times) == 1:
            raise OutOfMemory(5 * MIB, "no room for an input")
        return receive(*arguments, **named)

    worker.device.receive = short_once  # type: ignore[method-assign]
    with worker.connect() as caller:
        if relief[1]:
            assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4
        else:
            with pytest.raises(CallFailed) as failed:
                caller.call(DOUBLE, torch.ones(4))
            assert failed.value.failure == "out of memory"
            assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4
    assert worker.pressures == [5 * MIB]


@pytest.mark.parametrize("part", ["receive", "run"])
def test_call_is_made_alone_when_others_have_the_memory_that_was_made_for_it(part: str) -> None:
    """Others may call again while it asks for room, and take what it was given."""
    worker = LocalWorker()
    worker.relief = (None, True)
    real, times = getattr(worker.device, part), []

    def short_twice(*arguments: Any, **named: Any) -> Any:
        times.append(1)
        if len(times) <= 2:
            raise OutOfMemory(5 * MIB, "no room", by_others=len(times) == 2)
        return real(*arguments, **named)

    setattr(worker.device, part, short_twice)
    with worker.connect() as caller:
        assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4
        assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4
    assert worker.pressures == [5 * MIB]


def test_binding_is_refused_when_what_was_moved_to_the_host_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The channel goes on, and with it what only the worker has."""

    def short(*_: Any) -> Any:
        raise OutOfMemory(5 * MIB, "no room")

    worker = LocalWorker()
    with worker.connect() as caller:
        caller.call(DOUBLE, torch.ones(4), keys=[5])
        worker.executor.sessions.open("s").held(5, 0).parked = True
        worker.executor.sessions.close("s")
        bound = {0: [[1, 5, 0], "float32", [4], [1], 0]}
        with monkeypatch.context() as patched:
            patched.setattr(worker.device, "unpark", short)
            with pytest.raises(CallFailed) as failed:
                caller.bind(DOUBLE, bound)
        assert failed.value.failure == "out of memory"
        binding = caller.bind(DOUBLE, bound)
        assert caller.call(DOUBLE, None, binding=binding).outputs[0].tolist() == [2.0] * 4


class Holding:
    """A device's account of the memory that it keeps, as a GPU's allocator has it."""

    def __init__(self, worker: LocalWorker) -> None:
        self.kept_bytes, self.recorded_bytes = 0, 0
        worker.device.keeps_memory = True
        worker.device.used_bytes = lambda: self.kept_bytes + self.recorded_bytes  # type: ignore[method-assign]
        worker.device.release = self._release  # type: ignore[method-assign]
        self._graphs = worker.executor.memory.graphs
        clear = self._graphs.clear

        def cleared() -> None:
            clear()
            self.recorded_bytes = 0

        self._graphs.clear = cleared  # type: ignore[method-assign]

    def _release(self) -> None:
        self.kept_bytes = 0


def test_memory_that_stays_is_reported_with_the_peak() -> None:
    worker = LocalWorker()
    held = Holding(worker)
    held.kept_bytes = 7 * MIB
    with worker.connect() as caller:
        caller.call(DOUBLE, torch.ones(4))
        worker.ended.clear()
    worker.join()
    assert worker.executor.memory.peak_bytes >= 7 * MIB


def test_kept_memory_is_given_back_at_once_when_the_limit_falls_and_recordings_last() -> None:
    worker = LocalWorker()
    held = Holding(worker)
    held.kept_bytes, held.recorded_bytes = 8 * MIB, 2 * MIB

    worker.executor.memory.set_limit(11 * MIB)
    assert (held.kept_bytes, held.recorded_bytes) == (8 * MIB, 2 * MIB)
    worker.executor.memory.set_limit(5 * MIB)
    assert (held.kept_bytes, held.recorded_bytes) == (0, 2 * MIB)
    worker.executor.memory.set_limit(1 * MIB)
    assert (held.kept_bytes, held.recorded_bytes) == (0, 0)


def test_kept_memory_is_given_back_after_the_call_when_the_limit_falls_meanwhile() -> None:
    worker = LocalWorker()
    held = Holding(worker)
    run = worker.device.run

    def falling(work: Callable[[], Any], *, measure: bool) -> Any:
        held.kept_bytes = 8 * MIB
        worker.executor.memory.set_limit(6 * MIB)  # as the thread of orders does, during a call
        assert held.kept_bytes == 8 * MIB
        result, _ = run(work, measure=measure)
        return result, MIB

    worker.device.run = falling  # type: ignore[method-assign]
    with worker.connect() as caller:
        caller.call(DOUBLE, torch.ones(4))
    worker.join()
    assert held.kept_bytes == 0


def test_area_is_prepared_and_given_up_between_calls_only() -> None:
    worker = LocalWorker()
    gate = worker.executor.gate
    log: list[tuple[str, bool]] = []

    def share(_area: memoryview) -> Callable[[], None]:
        log.append(("shared", gate.locked()))
        return lambda: log.append(("closed", gate.locked()))

    worker.device.share = share  # type: ignore[method-assign, assignment]
    with worker.connect(arena_bytes=4096) as caller:
        caller.arena(8192)
    worker.join()
    assert log == [("shared", True), ("closed", True), ("shared", True), ("closed", True)]
