"""Calls: storages that a session keeps in the worker, and calls that lack memory."""

import pytest
import torch

from tests.kit.worlds.caller import (
    CallFailed,
    LocalWorker,
    program,
    step,
    weight,
)
from torch_shim.wire.programs import Named, Ref
from torch_shim.wire.protocol import MOST_BINDINGS, FrameKind

F = "t:torch.nn.functional."


def floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.float32)


def test_kept_storage_is_found_when_its_epoch_is_right() -> None:
    look = program(step("o:mul", Ref(0), 1), output=[Ref(1)])
    x = torch.arange(4.0)
    kept = [[1, 42, 0], "float32", [4], [1], 0]
    with LocalWorker().connect() as caller:
        caller.call(look, x, keys=[42])
        assert torch.equal(caller.call(look, kept).outputs[0], x)
        for key, epoch in ((42, 1), (43, 0)):
            with pytest.raises(CallFailed) as failed:
                caller.call(look, [[1, key, epoch], "float32", [4], [1], 0])
            assert failed.value.failure == "not held here any more"
            assert failed.value.facts == {"missing": [key]}


def test_kept_storage_is_another_copy_when_the_arena_is_written_over() -> None:
    look = program(step("o:mul", Ref(0), 1), output=[Ref(1)])
    with LocalWorker().connect(arena_bytes=1 << 16) as caller:
        caller.call(look, torch.arange(4.0), keys=[42])
        caller.call(look, torch.zeros(4))
        (found,) = caller.call(look, [[1, 42, 0], "float32", [4], [1], 0]).outputs
    assert found.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_kept_storage_has_the_next_epoch_when_a_program_wrote_to_it() -> None:
    grow = program(step("m:add_", Ref(0), 1), output=[])
    look = program(step("o:mul", Ref(0), 1), output=[Ref(1)])
    with LocalWorker().connect() as caller:
        reply = caller.call(grow, torch.zeros(4), keys=[42])
        assert floats(reply.changed[0]).tolist() == [1.0] * 4
        caller.call(grow, [[1, 42, 1], "float32", [4], [1], 0])
        with pytest.raises(CallFailed):
            caller.call(look, [[1, 42, 1], "float32", [4], [1], 0])
        found = caller.call(look, [[1, 42, 2], "float32", [4], [1], 0])
    assert found.outputs[0].tolist() == [2.0] * 4


def test_kept_storage_is_gone_when_a_call_failed_after_writing_to_it() -> None:
    spoil = program(step("m:zero_", Ref(0)), step("m:view", Ref(0), 3), output=[Ref(2)])
    look = program(step("o:mul", Ref(0), 1), output=[Ref(1)])
    kept = [[1, 42, 0], "float32", [4], [1], 0]
    with LocalWorker().connect() as caller:
        caller.call(look, torch.ones(4), keys=[42])
        with pytest.raises(CallFailed):
            caller.call(spoil, kept)
        with pytest.raises(CallFailed) as failed:
            caller.call(look, kept)
    assert failed.value.facts == {"missing": [42]}


def test_kept_storage_is_gone_when_it_was_dropped_or_its_session_closed() -> None:
    look = program(step("o:mul", Ref(0), 1), output=[Ref(1)])
    kept = [[1, 42, 0], "float32", [4], [1], 0]
    worker = LocalWorker()
    with worker.connect("one") as caller:
        caller.call(look, torch.ones(4), keys=[42])
        caller.ask(FrameKind.DROP, [42, 17])
        with pytest.raises(CallFailed):
            caller.call(look, kept)
        caller.call(look, torch.ones(4), keys=[42])
    worker.join()
    with worker.connect("one") as caller, pytest.raises(CallFailed):
        caller.call(look, kept)


def test_kept_storage_belongs_to_a_session_when_it_has_several_channels() -> None:
    look = program(step("o:mul", Ref(0), 1), output=[Ref(1)])
    kept = [[1, 42, 0], "float32", [4], [1], 0]
    worker = LocalWorker()
    with worker.connect("one") as first, worker.connect("one") as second:
        first.call(look, torch.ones(4), keys=[42])
        assert second.call(look, kept).outputs[0].tolist() == [1.0] * 4
        with worker.connect("two") as stranger, pytest.raises(CallFailed) as failed:
            stranger.call(look, kept)
        assert failed.value.facts == {"missing": [42]}


def test_kept_storages_leave_when_they_exceed_the_budget() -> None:
    look = program(step("o:mul", Ref(0), 1), output=[Ref(1)])
    worker = LocalWorker()
    worker.executor.sessions.budget_bytes = 40
    with worker.connect() as caller:
        for key in (1, 2, 3):
            caller.call(look, torch.full((4,), float(key)), keys=[key])
        found = [
            caller.call(look, [[1, key, 0], "float32", [4], [1], 0]).outputs[0][0].item()
            for key in (2, 3)
        ]
        assert found == [2.0, 3.0]
        with pytest.raises(CallFailed) as failed:
            caller.call(look, [[1, 1, 0], "float32", [4], [1], 0])
    assert failed.value.facts == {"missing": [1]}


def test_result_is_kept_when_it_was_given_a_key() -> None:
    double = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
    with LocalWorker().connect() as caller:
        reply = caller.call(double, torch.ones(4), options=(None, None, [9], None))
        assert reply.meta.storages[0].kept
        reply = caller.call(double, [[1, 9, 0], "float32", [4], [1], 0])
    assert reply.outputs[0].tolist() == [4.0] * 4


def test_call_asks_for_memory_when_its_peak_is_above_the_limit() -> None:
    what = program(step("m:repeat", Ref(0), 1 << 21), step("m:sum", Ref(1)), output=[Ref(2)])
    worker = LocalWorker()
    used_bytes = worker.device.used_bytes()
    worker.executor.memory.set_limit(used_bytes + (8 << 20))
    with worker.connect() as caller:
        with pytest.raises(CallFailed) as failed:
            caller.call(what, torch.ones(16))
        assert failed.value.failure == "out of memory"
        # 128 MiB; this process may have less of its own by then.
        assert worker.pressures[0] > used_bytes + (60 << 20)
        worker.relief = (1 << 40, True)
        assert caller.call(what, torch.ones(16)).outputs[0].item() == 16 << 21
        assert len(worker.pressures) == 2
        caller.call(what, torch.ones(16))
        assert len(worker.pressures) == 2


def test_call_is_tried_again_when_room_was_made() -> None:
    asked_bytes = 3 << 30  # never touched
    uint8 = Named("dtype", "uint8")
    what = program(
        step("t:torch.empty", [asked_bytes], dtype=uint8), step("m:numel", Ref(1)), output=[Ref(2)]
    )
    worker = LocalWorker()
    worker.executor.memory.set_limit(worker.device.used_bytes() + (8 << 20))
    with worker.connect() as caller:
        with pytest.raises(CallFailed) as failed:
            caller.call(what, 0)
        assert failed.value.failure == "out of memory"
        worker.relief = (2 * asked_bytes, True)
        assert caller.call(what, 0).outputs == [asked_bytes]
    assert len(worker.pressures) == 2
    assert all(need_bytes >= asked_bytes for need_bytes in worker.pressures)


def test_call_is_to_be_sent_again_when_memory_ran_out_after_it_wrote() -> None:
    what = program(step("m:add_", Ref(0), 1), step("t:torch.ones", [1 << 36]), output=[Ref(2)])
    worker = LocalWorker()
    worker.relief = (1 << 30, True)
    worker.executor.memory.set_limit(1 << 30)
    with worker.connect() as caller, pytest.raises(CallFailed) as failed:
        caller.call(what, torch.ones(4))
    assert failed.value.failure == "not held here any more"


def test_latest_bindings_of_a_program_stay_and_the_oldest_leaves() -> None:
    weights = [torch.full((3,), float(number)) for number in range(MOST_BINDINGS + 1)]
    what = program(step("o:mul", Ref(0), Ref(1)), inputs=2, output=[Ref(2)])
    worker = LocalWorker(*weights)
    x = torch.ones(3)
    with worker.connect() as caller:
        bindings = [
            caller.bind(what, {1: weight(worker.weights, number, value)})
            for number, value in enumerate(weights[:MOST_BINDINGS])
        ]
        for _ in range(2):  # by turns
            for binding, value in zip(bindings, weights, strict=False):
                reply = caller.call(what, x, None, binding=binding)
                assert torch.equal(reply.outputs[0], value)
        caller.call(what, x, None, binding=bindings[0])
        caller.bind(what, {1: weight(worker.weights, MOST_BINDINGS, weights[-1])})
        caller.call(what, x, None, binding=bindings[0])  # the one used last
        with pytest.raises(CallFailed) as failed:
            caller.call(what, x, None, binding=bindings[1])
        assert failed.value.failure == "not held here any more"
