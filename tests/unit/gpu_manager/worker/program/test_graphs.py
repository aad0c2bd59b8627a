"""When runs are recorded, what a replay reads, and what keeps a program from being recorded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_manager.call_errors import CannotRecord
from tests.kit.worlds.caller import (
    CallFailed,
    LocalWorker,
    program,
    raw,
    step,
    weight,
)
from torch_shim.wire.messages import SentOutput
from torch_shim.wire.programs import Constant, Ref

DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])


class Replayed:
    """Recorded work that a replay does once more, into the tensors of the first time."""

    def __init__(self, work: Callable[[], Any], result: Any) -> None:
        self._work = work
        self._result = result
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for old, new in zip(self._result, self._work(), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class HostRecorder:
    """Records on the CPU, as a CUDA graph does: fixed memory in, the same memory out."""

    def __init__(self) -> None:
        self.recordings: list[Replayed] = []
        self.refuse = ""

    def record(self, work: Callable[[], Any]) -> tuple[Replayed, Any]:
        if self.refuse:
            raise CannotRecord(self.refuse)
        result = work()
        self.recordings.append(Replayed(work, result))
        return self.recordings[-1], result


def recording(*weights: torch.Tensor) -> tuple[LocalWorker, HostRecorder]:
    worker = LocalWorker(*weights)
    recorder = HostRecorder()
    worker.device.recorder = recorder
    return worker, recorder


def test_run_is_replayed_when_it_recurs() -> None:
    worker, recorder = recording()
    with worker.connect() as caller:
        for number in range(6):
            x = torch.full((4,), float(number))
            assert torch.equal(caller.call(DOUBLE, x).outputs[0], x * 2)
    assert [one.replays for one in recorder.recordings] == [4]


def test_run_is_recorded_anew_when_shape_dtype_or_number_differ() -> None:
    what = program(step("o:mul", Ref(0), Ref(1)), inputs=2, output=[Ref(2)])
    worker, recorder = recording()
    with worker.connect() as caller:
        for x, factor in (
            (torch.ones(4), 2),
            (torch.ones(2, 2), 2),
            (torch.ones(4, dtype=torch.float64), 2),
            (torch.ones(4), 3),
            (torch.ones(4, dtype=torch.int64), True),
            (torch.ones(4, dtype=torch.int64), 1),
            (torch.ones(4, dtype=torch.int64), 1.0),
            (torch.ones(8)[::2], 2),
        ):
            for _ in range(4):
                (found,) = caller.call(what, x, factor).outputs
                assert torch.equal(found, x * factor)
                assert found.dtype is (x * factor).dtype
    assert [one.replays for one in recorder.recordings] == [2] * 8


def test_replay_reads_bound_weights_where_they_are() -> None:
    w = torch.randn(3, 4)
    what = program(step("t:torch.nn.functional.linear", Ref(0), Ref(1)), inputs=2, output=[Ref(2)])
    worker, recorder = recording(w)
    with worker.connect() as caller:
        binding = caller.bind(what, {1: weight(worker.weights, 0, w)})
        for _ in range(5):
            x = torch.randn(2, 4)
            assert torch.equal(caller.call(what, x, None, binding=binding).outputs[0], x @ w.T)
    assert [one.replays for one in recorder.recordings] == [3]


def test_replay_keeps_aliases_when_an_output_is_an_input() -> None:
    what = program(step("m:t", Ref(0)), step("o:mul", Ref(0), 2), output=[Ref(1), Ref(2), Ref(0)])
    worker, recorder = recording()
    x = torch.arange(6.0).view(2, 3)
    with worker.connect() as caller:
        for _ in range(4):
            reply = caller.call(what, x)
            assert reply.outputs[0] == SentOutput(-1, "float32", [3, 2], [1, 3], 0)
            assert torch.equal(reply.outputs[1], x * 2)
            assert reply.outputs[2] == SentOutput(-1, "float32", [2, 3], [3, 1], 0)
    assert len(recorder.recordings) == 1


def test_kept_result_is_a_copy_when_it_was_replayed() -> None:
    worker, recorder = recording()
    with worker.connect() as caller:
        for number in range(5):
            x = torch.full((4,), float(number))
            caller.call(DOUBLE, x, options=(None, None, [100 + number], None))
        for number in range(5):
            kept = [[1, 100 + number, 0], "float32", [4], [1], 0]
            reply = caller.call(program(step("o:add", Ref(0), 0), output=[Ref(1)]), kept)
            assert reply.outputs[0].tolist() == [2.0 * number] * 4
    assert recorder.recordings[0].replays == 3


@pytest.mark.parametrize(
    ("what", "options"),
    [
        (program(step("m:add_", Ref(0), 1), output=[Ref(0)]), (None, None, [], None)),
        (
            program(
                step("m:add_", Ref(1), Ref(0)),
                step("o:mul", Ref(1), 1),
                constants=(Constant("float32", (4,), raw(torch.zeros(4))),),
                output=[Ref(3)],
            ),
            (None, None, [], None),
        ),
        (
            program(step("t:torch.rand_like", Ref(0)), output=[Ref(1)], random=True),
            (None, raw(torch.get_rng_state()), [], None),
        ),
    ],
)
def test_program_is_never_recorded_when_it_writes_or_draws(what: Any, options: Any) -> None:
    worker, recorder = recording()
    with worker.connect() as caller:
        replies = [caller.call(what, torch.ones(4), options=options) for _ in range(5)]
    assert recorder.recordings == []
    assert len({str(reply.outputs) for reply in replies}) == 1


def test_program_runs_on_when_it_could_not_be_recorded() -> None:
    worker, recorder = recording()
    recorder.refuse = "it waits for a value"
    with worker.connect() as caller:
        for _ in range(5):
            assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4
    graphs = worker.executor.memory.graphs
    assert graphs.refused == {"it waits for a value": 1}
    assert graphs.replayed == 0


def test_modes_are_recorded_apart_when_one_computes_in_half() -> None:
    what = program(step("o:matmul", Ref(0), Ref(0)), output=[Ref(1)])
    x = torch.randn(8, 8)
    worker, recorder = recording()
    with worker.connect() as caller:
        for _ in range(4):
            half = caller.call(what, x, options=("bfloat16", None, [], None)).outputs[0]
            full = caller.call(what, x).outputs[0]
            assert half.dtype is torch.bfloat16
            assert full.dtype is torch.float32
    assert len(recorder.recordings) == 2


def test_recordings_are_given_up_when_memory_is_short() -> None:
    big = program(step("t:torch.empty", [1 << 40]), step("m:numel", Ref(1)), output=[Ref(2)])
    worker, recorder = recording()
    worker.executor.memory.set_limit(worker.device.used_bytes() + (64 << 20))
    with worker.connect() as caller:
        for _ in range(4):
            caller.call(DOUBLE, torch.ones(4))
        with pytest.raises(CallFailed) as failed:
            caller.call(big, 0)
        assert failed.value.failure == "out of memory"
        for _ in range(4):
            assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4
    assert [one.replays for one in recorder.recordings] == [2, 2]


def test_program_runs_without_a_recording_when_there_is_no_memory_for_one() -> None:
    worker, recorder = recording()

    def short(work: Callable[[], Any]) -> tuple[Replayed, Any]:
        raise torch.OutOfMemoryError(f"Tried to allocate 2.00 MiB for {work}.")

    recorder.record = short  # type: ignore[method-assign]
    with worker.connect() as caller:
        for _ in range(5):
            assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4
    assert worker.executor.memory.graphs.refused == {"no memory for a recording": 1}
    assert worker.pressures == []  # no other model has to leave for it
