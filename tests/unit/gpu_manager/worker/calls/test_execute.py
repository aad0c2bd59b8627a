"""One call: the same numbers as torch, aliases kept, inputs written back, memory within limits."""

from typing import Any

import pytest
import torch

from tests.kit.worlds.caller import (
    DIGEST,
    LEASE,
    Caller,
    CallFailed,
    LocalWorker,
    program,
    raw,
    step,
    weight,
)
from torch_shim.wire.arithmetic import arithmetic_in_force
from torch_shim.wire.messages import Arithmetic, SentOutput
from torch_shim.wire.programs import Constant, DeviceName, Named, Ref, Slice
from torch_shim.wire.protocol import FrameKind

F = "t:torch.nn.functional."


def floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.float32)


@pytest.mark.parametrize("arena_bytes", [0, 1 << 20, 256])
def test_call_gives_what_torch_gives_when_weights_are_bound(arena_bytes: int) -> None:
    x, w, b = torch.randn(5, 8), torch.randn(16, 8), torch.randn(16)
    what = program(
        step(F + "linear", Ref(0), Ref(1), Ref(2)),
        step("m:relu_", Ref(3)),
        inputs=3,
        output=[Ref(4), None, 3, 2.5, True],
    )
    worker = LocalWorker(w, b)
    with worker.connect(arena_bytes=arena_bytes) as caller:
        bound = {1: weight(worker.weights, 0, w), 2: weight(worker.weights, 1, b)}
        binding = caller.bind(what, bound)
        for _ in range(3):
            x = x + 1
            reply = caller.call(what, x, None, None, binding=binding)
            assert torch.equal(reply.outputs[0], torch.relu(x @ w.T + b))
            assert reply.outputs[1:] == [None, 3, 2.5, True]
            assert type(reply.outputs[4]) is bool
        caller.ask(FrameKind.DROP, [])  # answered after whatever the last call had to report
        assert worker.ran == [LEASE] * 3


def test_call_takes_numbers_as_they_are_when_they_are_equal() -> None:
    what = program(step("m:new_full", Ref(0), [2], Ref(1)), inputs=2, output=[Ref(2), Ref(1)])
    x = torch.ones(1, dtype=torch.int64)
    with LocalWorker().connect(arena_bytes=1 << 16) as caller:
        for number in (1, True, 1.0, 1):
            reply = caller.call(what, x, number)
            assert type(reply.outputs[1]) is type(number)


def test_call_draws_what_torch_draws_when_it_carries_the_state() -> None:
    what = program(
        step("t:torch.rand_like", Ref(0)), step("m:bernoulli", Ref(1)), output=[Ref(1), Ref(2)]
    )
    torch.manual_seed(5)
    state = raw(torch.get_rng_state())
    x = torch.zeros(100)
    rand = torch.rand_like(x)
    expected = [rand, rand.bernoulli()]
    after = raw(torch.get_rng_state())
    with LocalWorker().connect() as caller:
        first = caller.call(what, x, options=(None, state, [], None))
        again = caller.call(what, x, options=(None, state, [], None))
    for reply in (first, again):
        assert [torch.equal(a, b) for a, b in zip(reply.outputs, expected, strict=True)]
        assert torch.equal(reply.outputs[0], expected[0])
        assert torch.equal(reply.outputs[1], expected[1])
        assert reply.rng == after


def test_call_sends_back_an_input_when_the_program_wrote_to_it() -> None:
    what = program(step("m:add_", Ref(0), 1), output=[Ref(1), Ref(0)])
    x = torch.arange(6.0).view(2, 3)
    with LocalWorker().connect() as caller:
        reply = caller.call(what, x)
    assert torch.equal(floats(reply.changed[0]).view(2, 3), x + 1)
    assert reply.outputs == [
        SentOutput(-1, "float32", [2, 3], [3, 1], 0),
        SentOutput(-1, "float32", [2, 3], [3, 1], 0),
    ]


def test_call_sends_only_the_span_when_the_input_written_to_is_a_part() -> None:
    what = program(step("m:mul_", Ref(0), 2), output=[])
    x = torch.arange(10.0)[3:9:2]
    with LocalWorker().connect() as caller:
        reply = caller.call(what, x)
    assert floats(reply.changed[0]).tolist() == [6.0, 4.0, 10.0, 6.0, 14.0]


def test_call_keeps_aliases_when_two_inputs_share_a_storage() -> None:
    what = program(step("m:add_", Ref(0), 10), step("o:mul", Ref(1), 1), inputs=2, output=[Ref(3)])
    source, dtype = [2, 0, 16, 0, 0], "float32"
    x = torch.arange(4.0)
    with LocalWorker().connect(arena_bytes=1 << 16) as caller:
        caller.memory[:16] = raw(x)
        reply = caller.call(what, [source, dtype, [2], [1], 0], [source, dtype, [4], [1], 0])
    assert reply.outputs[0].tolist() == [10.0, 11.0, 2.0, 3.0]
    assert list(reply.changed) == [0]


def test_call_keeps_aliases_when_outputs_share_a_storage() -> None:
    what = program(
        step("o:mul", Ref(0), 2),
        step("m:t", Ref(1)),
        step("o:getitem", Ref(1), Slice(1, None, None)),
        output=[Ref(1), Ref(2), Ref(3)],
    )
    with LocalWorker().connect() as caller:
        reply = caller.call(what, torch.arange(6.0).view(2, 3))
    assert reply.sizes == [24]
    whole, turned, part = reply.outputs
    whole.zero_()
    assert turned.abs().sum() == 0
    assert part.abs().sum() == 0


def test_call_splits_a_storage_when_its_outputs_share_no_byte() -> None:
    what = program(
        step("o:mul", Ref(0), 1),
        step("m:chunk", Ref(1), 2),
        step("o:getitem", Ref(2), 0),
        step("o:getitem", Ref(2), 1),
        output=[Ref(3), Ref(4)],
    )
    x = torch.arange(64.0)
    with LocalWorker().connect() as caller:
        reply = caller.call(what, x)
    assert reply.sizes == [128, 128]
    assert torch.equal(torch.cat(reply.outputs), x)


@pytest.mark.parametrize(
    ("steps", "most_bytes"),
    [
        ([step("m:expand", Ref(1), 1 << 20, -1)], 4096),
        ([step("m:as_strided", Ref(1), [1 << 12, 16], [1, 1])], 1 << 15),
        ([step("m:repeat", Ref(1), 4096, 1), step("o:getitem", Ref(2), 5)], 4096),
        ([step("m:repeat", Ref(1), 64, 64), step("m:select", Ref(2), 1, 0)], 1 << 16),
    ],
)
def test_result_stays_small_when_the_output_is_a_view(steps: list[Any], most_bytes: int) -> None:
    what = program(step("o:mul", Ref(0), 1), *steps, output=[Ref(1 + len(steps))])
    x = torch.arange(8192.0).view(1, -1)[:, :1024] if len(steps) == 2 else torch.ones(1, 1024)
    if steps[0].operator == "m:as_strided":
        x = torch.arange(8192.0)
    worker = LocalWorker()
    with worker.connect() as caller:
        reply = caller.call(what, x)
    assert sum(reply.sizes) <= most_bytes
    values: list[Any] = [x, x * 1]
    for one in steps:
        found = worker.table.find(one.operator)
        assert found is not None
        values.append(found(values[-1], *one.arguments[1:]))
    assert torch.equal(reply.outputs[0], values[-1])


def test_result_keeps_its_strides_when_it_is_permuted() -> None:
    what = program(
        step("m:contiguous", Ref(0), memory_format=Named("memory_format", "channels_last")),
        output=[Ref(1)],
    )
    x = torch.randn(2, 3, 4, 4)
    with LocalWorker().connect() as caller:
        (found,) = caller.call(what, x).outputs
    assert torch.equal(found, x)
    assert found.stride() == x.contiguous(memory_format=torch.channels_last).stride()


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_result_keeps_its_shape_when_it_is_empty_or_a_scalar(shape: tuple[int, ...]) -> None:
    what = program(step("o:mul", Ref(0), 3), output=[Ref(1)])
    with LocalWorker().connect(arena_bytes=1 << 16) as caller:
        (found,) = caller.call(what, torch.ones(shape)).outputs
    assert torch.equal(found, torch.ones(shape) * 3)


@pytest.mark.parametrize("arena_bytes", [1 << 12, 0])
def test_result_comes_beside_the_arena_when_it_is_too_large_for_it(arena_bytes: int) -> None:
    what = program(step("m:repeat", Ref(0), 4096), output=[Ref(1)])
    x = torch.arange(8.0)
    with LocalWorker().connect(arena_bytes=arena_bytes) as caller:
        reply = caller.call(what, x)
        assert reply.meta.storages[0].offset == -1
        assert torch.equal(reply.outputs[0], x.repeat(4096))


def test_weights_are_as_sent_when_a_program_wrote_to_them() -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    what = program(
        step(F + "batch_norm", Ref(0), Ref(1), Ref(2), None, None, True), inputs=3, output=[Ref(3)]
    )
    x = torch.randn(4, 3, 2, 2)
    worker = LocalWorker(mean, variance)
    bound = {1: weight(worker.weights, 0, mean), 2: weight(worker.weights, 1, variance)}
    expected_mean, expected_variance = mean.clone(), variance.clone()
    expected = torch.nn.functional.batch_norm(x, expected_mean, expected_variance, training=True)
    with worker.connect() as caller:
        for _ in range(2):
            binding = caller.bind(what, bound)
            reply = caller.call(what, x, None, None, binding=binding)
            assert torch.equal(reply.outputs[0], expected)
            assert torch.equal(floats(reply.changed[1]), expected_mean)
            assert torch.equal(floats(reply.changed[2]), expected_variance)
            with pytest.raises(CallFailed) as failed:
                caller.call(what, x, None, None, binding=binding)
            assert failed.value.failure == "not held here any more"


def test_weights_are_as_sent_when_a_call_fails_after_writing_to_them() -> None:
    w = torch.arange(4.0)
    spoil = program(step("m:zero_", Ref(0)), step("m:view", Ref(0), 3), output=[Ref(2)])
    look = program(step("o:mul", Ref(0), 1), output=[Ref(1)])
    worker = LocalWorker(w)
    with worker.connect() as caller:
        described = weight(worker.weights, 0, w)
        with pytest.raises(CallFailed) as failed:
            caller.call(spoil, described)
        assert failed.value.failure == "operator failed"
        assert torch.equal(caller.call(look, described).outputs[0], w)


def test_constants_are_as_sent_when_a_program_writes_to_them() -> None:
    constant = Constant("float32", (2,), raw(torch.zeros(2)))
    what = program(
        step("m:add_", Ref(1), Ref(0)),
        step("o:mul", Ref(1), 1),
        constants=(constant,),
        output=[Ref(3)],
    )
    with LocalWorker().connect() as caller:
        for _ in range(3):
            assert caller.call(what, torch.ones(2)).outputs[0].tolist() == [1.0, 1.0]


def test_call_computes_in_half_when_autocast_is_on() -> None:
    what = program(step("o:matmul", Ref(0), Ref(0)), output=[Ref(1)])
    x = torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = x @ x
    with LocalWorker().connect() as caller:
        reply = caller.call(what, x, options=("bfloat16", None, [], None))
        plain = caller.call(what, x)
    assert torch.equal(reply.outputs[0], expected)
    assert plain.outputs[0].dtype is torch.float32


def test_call_makes_the_default_dtype_when_it_names_one() -> None:
    what = program(step("t:torch.ones", [2], device=DeviceName("cuda")), output=[Ref(1)])
    with LocalWorker().connect() as caller:
        found = caller.call(what, 0, options=(None, None, [], "float64"))
        plain = caller.call(what, 0)
    assert found.outputs[0].dtype is torch.float64
    assert plain.outputs[0].dtype is torch.float32
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("operator", ["m:t_", "m:unsqueeze_", "m:squeeze_"])
def test_call_is_refused_when_an_input_changes_its_shape_in_place(operator: str) -> None:
    arguments = [0] if operator != "m:t_" else []
    what = program(step(operator, Ref(0), *arguments), output=[])
    look = program(step("o:mul", Ref(0), 1), output=[Ref(1)])
    w = torch.arange(6.0).view(1, 6)
    worker = LocalWorker(w)
    with worker.connect(arena_bytes=1 << 16) as caller:
        described = weight(worker.weights, 0, w)
        binding = caller.bind(what, {0: described})
        for given, bound in ((w, None), (described, None), (None, binding)):
            with pytest.raises(CallFailed) as failed:
                caller.call(what, given, binding=bound)
            assert failed.value.failure == "operator failed"
        assert torch.equal(caller.call(look, w).outputs[0], w)


def test_call_fails_with_torchs_words_when_an_operator_fails() -> None:
    what = program(step("m:view", Ref(0), 5), output=[Ref(1)])
    with LocalWorker().connect() as caller:
        with pytest.raises(CallFailed) as failed:
            caller.call(what, torch.ones(4))
        assert failed.value.failure == "operator failed"
        assert "shape '[5]' is invalid" in failed.value.message
        assert caller.call(program(output=[Ref(0)]), torch.ones(4)).outputs[0].source == -1


def test_call_is_refused_when_its_lease_is_not_in_force() -> None:
    what = program(output=[1])
    worker = LocalWorker()
    with worker.connect() as caller:
        with pytest.raises(CallFailed) as failed:
            caller.call(what, 0, lease=8)
        assert failed.value.failure == "lease not in force"
        worker.leases.end(LEASE)
        assert worker.ended == [LEASE]
        with pytest.raises(CallFailed):
            caller.call(what, 0)


@pytest.mark.parametrize("elements", [4, 1 << 19], ids=["copied in place", "copied anew"])
def test_caller_that_writes_to_its_arena_changes_no_call_under_way(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = LocalWorker()
    with worker.connect(arena_bytes=8 << 20) as caller:
        run = worker.device.run

        def run_late(*work: Any, **options: Any) -> Any:
            caller.memory[: 4 * elements] = b"\xff" * 4 * elements  # after every check
            return run(*work, **options)

        monkeypatch.setattr(worker.device, "run", run_late)
        sorts = step("m:sort", Ref(0))  # it would leave its memory if its input changed meanwhile
        double = program(step("o:mul", Ref(0), 2), sorts, output=[Ref(1)])
        for number in range(3):
            sent = torch.full((elements,), float(number))
            assert torch.equal(caller.call(double, sent).outputs[0], 2 * sent)


def test_images_are_found_by_digest_place_and_size_only() -> None:
    look = program(step("o:mul", Ref(0), 1), output=[Ref(1)])
    w = torch.arange(4.0)
    worker = LocalWorker(w)
    with worker.connect() as caller:
        for source in (
            [0, "e" * 64, 0, 16],
            [0, DIGEST, 4, 12],
            [0, DIGEST, 0, 8],
            [0, DIGEST, 0],
            [0, None, 0, 16],
        ):
            with pytest.raises(CallFailed) as failed:
                caller.call(look, [source, "float32", [2], [1], 0])
            assert failed.value.failure in {"unknown model", "bad frame"}


def test_worker_forgets_a_channel_when_it_closes() -> None:
    worker = LocalWorker()
    caller: Caller
    with worker.connect() as caller:
        caller.call(program(output=[1]), 0)
    worker.join()
    assert worker.notes == []


def test_program_computes_with_the_settings_that_come_with_the_call() -> None:
    worker = LocalWorker()
    found: list[Arithmetic] = []
    run = worker.device.run

    def noting(work: Any, *, measure: bool) -> Any:
        found.append(arithmetic_in_force())
        return run(work, measure=measure)

    worker.device.run = noting  # type: ignore[method-assign]
    what = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
    exact = Arithmetic("highest", False, False, True, 2)
    with worker.connect() as caller:
        for sent in (exact, exact, None):
            options = (None, None, [], None, *(("", list(sent)) if sent else ()))
            caller.call(what, torch.ones(2), options=options)
        with pytest.raises(CallFailed, match="Invalid enum value"):
            caller.call(what, torch.ones(2), options=(None, None, [], None, "", ["fast"]))
    assert found == [exact, exact, Arithmetic()]
