"""Calls that run again by their numbers, and others that are named, as a worker sees them."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from msgspec import msgpack, structs

from gpu_manager.worker.merging.merged_calls import Merging
from gpu_manager.worker.orders import Admission
from gpu_manager.worker.recorded_calls import RecordedCalls
from tests.kit.waiting import wait_until
from tests.kit.worlds.caller import (
    LEASE,
    Caller,
    CallFailed,
    LocalWorker,
    Reply,
    program,
    step,
    weight,
)
from torch_shim.wire.messages import AS_RECORDED, MOST_RECORDED, STAYS, SentOutput
from torch_shim.wire.programs import Ref
from torch_shim.wire.protocol import NOTES_BYTES, Frame, FrameKind

ARENA_BYTES = 1 << 20
NOTES = ARENA_BYTES - NOTES_BYTES
WEIGHT = torch.arange(16.0).view(4, 4)
PLAIN = program(step("t:torch._C._nn.linear", Ref(0), Ref(1)), inputs=2, output=[Ref(2)])
MISSING, REFUSED = "not held here any more", "lease not in force"


@pytest.fixture
def worker() -> LocalWorker:
    return LocalWorker(WEIGHT, features=[Merging, RecordedCalls])


@pytest.fixture
def caller(worker: LocalWorker) -> Iterator[Caller]:
    with worker.connect(arena_bytes=ARENA_BYTES) as found:
        yield found
    worker.join()


def options(number: int = 1, notes: int = NOTES, **more: Any) -> list[Any]:
    """The options of a call that is to be recorded."""
    found = {"rng": None, "keys": [], "residents": None} | more
    return [
        *(None, found["rng"], found["keys"], None, "", None),
        *(found["residents"], False, [number, notes]),
    ]


def bound(worker: LocalWorker, caller: Caller) -> int:
    return caller.bind(PLAIN, {1: weight(worker.weights, 0, WEIGHT)})


def record(worker: LocalWorker, caller: Caller, x: torch.Tensor, number: int = 1) -> Reply:
    binding = bound(worker, caller)
    return caller.call(PLAIN, x, None, binding=binding, options=options(number))


def put(caller: Caller, x: torch.Tensor) -> None:
    caller.memory[: x.nbytes] = x.numpy().tobytes()


def again(caller: Caller, number: int = 1, lease: int = LEASE) -> None:
    frame = caller.ask(FrameKind.RUN_AGAIN, [number, lease])
    assert (frame.kind, frame.meta) == (FrameKind.RAN_AGAIN, (number, 0))


def found(caller: Caller, reply: Reply) -> torch.Tensor:
    (part,), (view,) = reply.meta.storages, reply.meta.views
    assert isinstance(view, SentOutput)
    data = bytearray(caller.memory[part.offset : part.offset + part.size_bytes])
    flat = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
    return torch.empty(0).set_(flat, view.offset, view.shape, view.strides)


def test_recorded_call_computes_with_what_the_arena_holds_then(
    worker: LocalWorker, caller: Caller
) -> None:
    x = torch.ones(2, 4)
    reply = record(worker, caller, x)
    assert reply.meta.recorded == ""
    for factor in (2.0, -3.0, 0.5):
        put(caller, x * factor)
        again(caller)
        assert torch.equal(found(caller, reply), (x * factor) @ WEIGHT.T)
    wait_until(lambda: len(worker.ran) == 4, "every run is counted")


def test_recorded_call_says_its_times_and_where_its_trace_lies_is_told_by_a_note(
    worker: LocalWorker, caller: Caller
) -> None:
    record(worker, caller, torch.ones(2, 4))
    worker.executor.run_s = 0.25
    trace = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
    caller.memory[NOTES + 32 : NOTES + 33 + len(trace)] = bytes([len(trace)]) + trace
    again(caller)
    waited_s, moved_s, computed_s, out_s = struct.unpack_from("<4d", caller.memory, NOTES)
    assert (computed_s, waited_s >= 0, moved_s >= out_s > 0) == (0.25, True, True)
    caller.wire.socket.sendall(b"no frame at all, for sure")
    wait_until(lambda: worker.notes, "the channel has ended")
    assert worker.traces == [trace.decode()]


def test_numbers_of_bytes_in_the_trace_are_bounded(worker: LocalWorker, caller: Caller) -> None:
    record(worker, caller, torch.ones(2, 4))
    caller.memory[NOTES + 32] = 255
    again(caller)
    caller.wire.socket.sendall(b"no frame at all, for sure")
    wait_until(lambda: worker.notes, "the channel has ended")
    assert len(worker.traces[0]) == NOTES_BYTES - 33


@pytest.mark.parametrize(
    ("why", "what", "inputs", "more"),
    [
        (
            "it draws random numbers, or writes to its inputs",
            program(step("t:torch.relu_", Ref(0)), output=[Ref(1)]),
            [torch.ones(4)],
            {},
        ),
        (
            "it draws random numbers, or writes to its inputs",
            program(step("t:torch.rand", [4]), inputs=0, output=[Ref(0)], random=True),
            [],
            {"rng": torch.default_generator.get_state().numpy().tobytes()},
        ),
        (
            "an output is no tensor, or lies in an input",
            program(step("m:view", Ref(0), 4), output=[Ref(1)]),
            [torch.ones(4)],
            {},
        ),
        (
            "an output is no tensor, or lies in an input",
            program(step("m:size", Ref(0), 0), output=[Ref(1)]),
            [torch.ones(4)],
            {},
        ),
        (
            "its outputs share memory, or have gaps",
            program(
                step("t:torch.relu", Ref(0)), step("m:chunk", Ref(1), 2), output=[Ref(1), Ref(1)]
            ),
            [torch.ones(4)],
            {},
        ),
        (
            "its outputs share memory, or have gaps",
            program(step("t:torch.relu", Ref(0)), step("m:expand", Ref(1), 3, 4), output=[Ref(2)]),
            [torch.ones(4)],
            {},
        ),
        (
            "its outputs share memory, or have gaps",
            program(
                step("t:torch.relu", Ref(0)), step("m:expand", Ref(1), 1 << 40, 4), output=[Ref(2)]
            ),
            [torch.ones(4)],
            {},
        ),
        ("an output is large", PLAIN, [torch.ones(4), torch.ones(4, 4)], {"keys": [77]}),
        (
            "an output is large",
            program(step("t:torch.relu", Ref(0)), output=[Ref(1)]),
            [torch.ones(4)],
            {"residents": [99, 1, {}, []]},
        ),
    ],
)
def test_call_is_not_recorded_where_it_would_not_be_the_same_again(
    caller: Caller, why: str, what: Any, inputs: list[Any], more: dict[str, Any]
) -> None:
    reply = caller.call(what, *inputs, options=options(**more))
    assert reply.meta.recorded == why
    with pytest.raises(CallFailed, match="recorded call 1"):
        again(caller)


def test_call_with_a_kept_input_is_not_recorded(caller: Caller) -> None:
    reply = caller.call(PLAIN, torch.ones(4), torch.ones(4, 4), keys=[7, 8], options=options())
    assert reply.meta.recorded == "an input stays with the worker"


@pytest.mark.parametrize("notes", [64, ARENA_BYTES - 1, ARENA_BYTES, 1 << 61])
def test_notes_lie_behind_the_outputs_and_inside_of_the_arena(
    worker: LocalWorker, caller: Caller, notes: int
) -> None:
    binding = bound(worker, caller)
    asks = options(notes=notes)
    reply = caller.call(PLAIN, torch.ones(2, 4), None, binding=binding, options=asks)
    assert reply.meta.recorded == "the arena is full"


def test_call_without_a_shared_arena_is_not_recorded(worker: LocalWorker) -> None:
    with worker.connect() as caller:
        reply = caller.call(PLAIN, torch.ones(4), torch.ones(4, 4), options=options())
        assert reply.meta.recorded == "an output is large"


def test_recording_ends_with_its_arena(worker: LocalWorker, caller: Caller) -> None:
    record(worker, caller, torch.ones(2, 4))
    caller.arena(2 * ARENA_BYTES)
    with pytest.raises(CallFailed) as failed:
        again(caller)
    assert (failed.value.failure, failed.value.facts) == (MISSING, {"missing": []})


def test_recorded_call_has_the_weights_as_they_were_though_another_program_wrote_to_them(
    worker: LocalWorker, caller: Caller
) -> None:
    x = torch.ones(2, 4)
    binding = bound(worker, caller)
    reply = caller.call(PLAIN, x, None, binding=binding, options=options())
    again(caller)
    writes = program(step("m:add_", Ref(0), 1.0), output=[Ref(1)])
    other = caller.bind(writes, {0: weight(worker.weights, 0, WEIGHT)})
    caller.call(writes, None, binding=other)  # the weights are restored, `other` is gone
    put(caller, x)
    again(caller)
    assert torch.equal(found(caller, reply), x @ WEIGHT.T)


def test_number_that_is_used_again_names_the_later_call(
    worker: LocalWorker, caller: Caller
) -> None:
    record(worker, caller, torch.ones(2, 4))
    reply = record(worker, caller, torch.ones(3, 4))
    put(caller, torch.full((3, 4), 2.0))
    again(caller)
    assert torch.equal(found(caller, reply), torch.full((3, 4), 2.0) @ WEIGHT.T)


@pytest.mark.parametrize("number", [0, -1, MOST_RECORDED + 1, 1 << 62])
def test_numbers_are_bounded(worker: LocalWorker, caller: Caller, number: int) -> None:
    binding = bound(worker, caller)
    with pytest.raises(CallFailed, match="bad frame"):
        caller.call(PLAIN, torch.ones(4), None, binding=binding, options=options(number))


def test_recorded_call_is_refused_when_its_lease_has_ended(
    worker: LocalWorker, caller: Caller
) -> None:
    record(worker, caller, torch.ones(2, 4))
    worker.leases.end(LEASE)
    with pytest.raises(CallFailed) as failed:
        again(caller)
    assert failed.value.failure == REFUSED
    worker.leases.admit(Admission(LEASE + 1, "s"))
    again(caller, lease=LEASE + 1)
    with pytest.raises(CallFailed):
        again(caller, lease=LEASE)


def test_recorded_call_of_another_sessions_lease_is_refused(
    worker: LocalWorker, caller: Caller
) -> None:
    record(worker, caller, torch.ones(2, 4))
    worker.leases.admit(Admission(LEASE + 1, "another"))
    with pytest.raises(CallFailed, match="another session's"):
        again(caller, lease=LEASE + 1)


def test_recorded_call_that_lacks_memory_is_left_to_the_call_as_ever(
    worker: LocalWorker, caller: Caller
) -> None:
    reply = record(worker, caller, torch.ones(2, 4))
    worker.executor.memory.limit_bytes = 0
    worker.relief = (None, False)
    with pytest.raises(CallFailed):
        again(caller)
    assert worker.pressures, "memory was asked for as for any call"
    worker.executor.memory.set_limit(1 << 40)
    put(caller, torch.ones(2, 4))
    with suppress(CallFailed):
        again(caller)
    assert torch.equal(found(caller, reply), torch.ones(2, 4) @ WEIGHT.T)


def test_output_of_another_shape_is_no_recorded_one(caller: Caller) -> None:
    what = program(step("m:nonzero", Ref(0)), output=[Ref(1)])
    reply = caller.call(what, torch.tensor([1.0, 0.0, 1.0]), options=options())
    assert reply.meta.recorded == ""
    put(caller, torch.tensor([1.0, 1.0, 1.0]))
    with pytest.raises(CallFailed, match="of this shape"):
        again(caller)
    put(caller, torch.tensor([0.0, 1.0, 1.0]))
    again(caller)


def test_recorded_call_that_fails_is_left_to_the_call_as_ever(caller: Caller) -> None:
    what = program(step("m:index_select", Ref(0), 0, Ref(1)), inputs=2, output=[Ref(2)])
    x, index = torch.arange(4.0), torch.tensor([1])
    reply = caller.call(what, x, index, options=options())
    assert reply.meta.recorded == ""
    place = 64  # the second input's
    caller.memory[place : place + 8] = struct.pack("<q", 9)
    with pytest.raises(CallFailed) as failed:
        again(caller)
    assert failed.value.failure == MISSING
    caller.memory[place : place + 8] = struct.pack("<q", 3)
    again(caller)
    assert found(caller, reply).tolist() == [3.0]


def test_worker_without_the_feature_says_nothing_of_recordings() -> None:
    plain = LocalWorker(WEIGHT)
    with plain.connect(arena_bytes=ARENA_BYTES) as caller:
        reply = record(plain, caller, torch.ones(2, 4))
        assert reply.meta.recorded is None
        with pytest.raises(CallFailed, match="nothing here answers RUN_AGAIN"):
            again(caller)
    plain.join()


def test_program_that_enters_modes_leaves_them_when_it_is_recorded(caller: Caller) -> None:
    enter = step("t:torch.amp.autocast_mode._enter_autocast", "cuda", None, True, None)
    what = program(enter, step("o:matmul", Ref(0), Ref(0)), output=[Ref(2)])
    reply = caller.call(what, torch.ones(4, 4), options=options())
    assert reply.meta.recorded == ""
    again(caller)
    plain = program(step("o:matmul", Ref(0), Ref(0)), output=[Ref(1)])
    (product,) = caller.call(plain, torch.ones(4, 4)).outputs
    assert product.dtype is torch.float32


# -- calls with a state: described no more, and otherwise made as ever -----------------------------

DRAWS = program(
    step("t:torch.rand", [4]),
    step("o:add", Ref(0), Ref(1)),
    inputs=1,
    output=[Ref(2)],
    random=True,
)
COUNTS = program(step("m:add_", Ref(0), Ref(1)), inputs=2, output=[Ref(2)])
FIRST_KEY = 1 << 40


def generator_state(seed: int = 0) -> bytes:
    content: bytes = torch.Generator().manual_seed(seed).get_state().numpy().tobytes()
    return content


def residents(first_key: int) -> list[Any]:
    return [first_key, 1, {}, []]


def named(
    caller: Caller,
    reply: Reply,
    kept: Sequence[tuple[int, int]] = (),
    *,
    number: int = 1,
    lease: int = LEASE,
    **more: Any,
) -> Reply:
    """The answer to a call that names the recorded one, which `reply` answered."""
    said = [*options(**more)[:-1], None]
    frame = caller.ask(FrameKind.CALL_AGAIN, [lease, number, list(kept), said])
    meta = frame.meta
    if meta.recorded != AS_RECORDED:
        return caller.read(frame)
    assert (meta.storages, meta.views, meta.changed, frame.descriptors) == ([], [], [], ())
    told = structs.replace(reply.meta, rng=meta.rng, recorded=AS_RECORDED)
    return caller.read(Frame(FrameKind.RESULT, msgpack.encode(told), memoryview(b""), ()))


def test_named_call_draws_the_numbers_that_come_next(caller: Caller) -> None:
    x = torch.arange(4.0)
    reply = caller.call(DRAWS, x, options=options(notes=0, rng=generator_state()))
    assert reply.meta.recorded == ""
    native = torch.Generator().manual_seed(0)
    assert torch.equal(reply.outputs[0], x + torch.rand(4, generator=native))
    for _ in range(3):
        assert reply.rng is not None
        rng = reply.rng
        reply = named(caller, reply, rng=rng)
        assert reply.meta.recorded == AS_RECORDED
        assert torch.equal(reply.outputs[0], x + torch.rand(4, generator=native))
    with pytest.raises(CallFailed, match="has a generator's state"):
        named(caller, reply)


def test_named_call_says_what_it_wrote_to_a_sent_input(caller: Caller) -> None:
    count = torch.tensor([1.0, 2.0])
    reply = caller.call(COUNTS, count, torch.ones(2), options=options(notes=0))
    assert reply.meta.recorded == ""
    for step_size in (2.0, 5.0):
        put(caller, count)
        caller.memory[64:72] = torch.full((2,), step_size).numpy().tobytes()
        reply = named(caller, reply)
        assert reply.meta.recorded == AS_RECORDED
        assert reply.changed[0].view(torch.float32).tolist() == [1 + step_size, 2 + step_size]


def test_named_call_has_the_kept_input_of_the_epoch_that_it_says(caller: Caller) -> None:
    cache, x = torch.zeros(4), torch.ones(4)
    caller.call(COUNTS, cache, x, keys=[5], options=options(residents=residents(FIRST_KEY)))
    kept = [[1, 5, 1], "float32", [4], [1], 0]
    asks = options(notes=0, residents=residents(FIRST_KEY + 8))
    reply = caller.call(COUNTS, kept, x, options=asks)
    assert reply.meta.recorded == ""
    assert [(part.position, part.offset) for part in reply.meta.changed] == [(0, STAYS)]
    for epoch in (2, 3, 4):
        reply = named(caller, reply, [(5, epoch)], residents=residents(FIRST_KEY + 8 * epoch))
        assert reply.meta.recorded == AS_RECORDED
    with pytest.raises(CallFailed) as failed:
        named(caller, reply, [(5, 4)], residents=residents(FIRST_KEY + 64))
    assert (failed.value.failure, failed.value.facts) == (MISSING, {"missing": [5]})
    size = caller.ask(FrameKind.FETCH, [5, 5]).meta.size_bytes
    assert size == 16


def test_named_call_leaves_its_outputs_under_keys_of_its_own(caller: Caller) -> None:
    what = program(step("m:mul", Ref(0), 2.0), output=[Ref(1)])
    reply = caller.call(
        what, torch.ones(4), options=options(notes=0, residents=residents(FIRST_KEY))
    )
    assert reply.meta.recorded == ""
    put(caller, torch.full((4,), 3.0))
    again = named(caller, reply, residents=residents(FIRST_KEY + 8))
    assert again.meta.recorded == AS_RECORDED
    for key, value in ((FIRST_KEY, 2.0), (FIRST_KEY + 8, 6.0)):
        kept = [[1, key, 0], "float32", [4], [1], 0]
        (output,) = caller.call(program(step("m:add", Ref(0), 0.0), output=[Ref(1)]), kept).outputs
        assert output.tolist() == [value] * 4


def test_named_call_keeps_copies_of_outputs_under_the_keys_that_it_says(caller: Caller) -> None:
    what = program(step("m:mul", Ref(0), 2.0), output=[Ref(1)])
    reply = caller.call(what, torch.ones(4), options=options(notes=0, keys=[71]))
    again = named(caller, reply, keys=[72])
    assert (again.meta.recorded, again.outputs[0].tolist()) == (AS_RECORDED, [2.0] * 4)
    kept = [[1, 72, 0], "float32", [4], [1], 0]
    (output,) = caller.call(what, kept).outputs
    assert output.tolist() == [4.0] * 4


@pytest.mark.parametrize(
    ("given", "more"),
    [
        (torch.tensor([0.0, 2.0, 3.0, 0.0]), {}),  # an output of another shape
        (torch.tensor([0.0, 2.0, 0.0, 0.0]), {"keys": [9]}),  # one that is kept
    ],
)
def test_answer_of_another_form_is_told_as_ever_and_what_was_written_stays_written(
    caller: Caller, given: torch.Tensor, more: dict[str, Any]
) -> None:
    what = program(
        step("m:add_", Ref(0), 1.0), step("m:nonzero", Ref(1)), inputs=2, output=[Ref(3)]
    )
    caller.call(what, torch.zeros(4), torch.ones(4), keys=[5])
    kept = [[1, 5, 1], "float32", [4], [1], 0]
    reply = caller.call(what, kept, torch.tensor([1.0, 0, 0, 0]), options=options(notes=0))
    assert (reply.meta.recorded, reply.outputs[0].tolist()) == ("", [[0]])
    put(caller, given)
    reply = named(caller, reply, [(5, 2)], **more)
    assert reply.meta.recorded is None
    assert torch.equal(reply.outputs[0], given.nonzero())
    assert reply.changed[0].view(torch.float32).tolist() == [3.0] * 4


@pytest.mark.parametrize("kept", [[], [(5, 1), (6, 1)]])
def test_as_many_kept_inputs_are_named_as_the_call_has(
    caller: Caller, kept: list[tuple[int, int]]
) -> None:
    caller.call(COUNTS, torch.zeros(4), torch.ones(4), keys=[5, 6])
    lies = [[1, 5, 1], "float32", [4], [1], 0]
    reply = caller.call(COUNTS, lies, torch.ones(4), options=options(notes=0))
    with pytest.raises(CallFailed, match="kept storages for 1 inputs"):
        named(caller, reply, kept)


@pytest.mark.parametrize(
    ("why", "output", "arena_bytes"),
    [
        ("an output is a number", [Ref(1), Ref(2)], ARENA_BYTES),
        ("what it gives lies outside of the arena", [Ref(1)], 4096),
        ("what it gives lies outside of the arena", [Ref(1)], 0),
        ("it has too many inputs and outputs", [Ref(1)] * 4096, ARENA_BYTES),
    ],
)
def test_call_is_not_named_whose_answer_cannot_be_the_same(
    worker: LocalWorker, why: str, output: list[Any], arena_bytes: int
) -> None:
    what = program(step("m:mul", Ref(0), 2.0), step("m:size", Ref(0), 0), output=output)
    with worker.connect(arena_bytes=arena_bytes) as caller:
        reply = caller.call(what, torch.ones(800), options=options(notes=0))
        assert reply.meta.recorded == why
        with pytest.raises(CallFailed, match="recorded call 1"):
            named(caller, reply)


def test_named_call_ends_with_its_arena_its_binding_and_its_number(
    worker: LocalWorker, caller: Caller
) -> None:
    x = torch.ones(2, 4)
    asks = options(notes=0)
    writes = program(step("m:add_", Ref(0), 1.0), output=[Ref(1)])

    def recorded() -> Reply:
        return caller.call(PLAIN, x, None, binding=bound(worker, caller), options=asks)

    reply = recorded()
    assert named(caller, reply).meta.recorded == AS_RECORDED
    record(worker, caller, x)  # the number is another recording's
    with pytest.raises(CallFailed, match="recorded call 1"):
        named(caller, reply)
    recorded()
    with pytest.raises(CallFailed, match="recorded call 1"):
        again(caller)
    gone = caller.bind(writes, {0: weight(worker.weights, 0, WEIGHT)})
    reply = caller.call(writes, None, binding=gone, options=asks)
    with pytest.raises(CallFailed) as failed:
        named(caller, reply)
    assert (failed.value.failure, failed.value.facts) == (MISSING, {"missing": []})
    reply = recorded()
    caller.memory = caller.arena(ARENA_BYTES)
    with pytest.raises(CallFailed, match="recorded call 1"):
        named(caller, reply)


def test_named_call_is_refused_without_its_lease(worker: LocalWorker, caller: Caller) -> None:
    reply = caller.call(COUNTS, torch.ones(2), torch.ones(2), options=options(notes=0))
    worker.leases.end(LEASE)
    with pytest.raises(CallFailed) as failed:
        named(caller, reply)
    assert failed.value.failure == REFUSED
