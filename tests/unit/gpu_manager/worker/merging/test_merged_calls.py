"""Calls that wait together: run as one with the results of single calls, or singly, and why."""

import contextlib
import os
import threading
import time
import warnings
from typing import Any

import pytest
import torch

from gpu_manager.worker.merging import group_runs
from gpu_manager.worker.merging.merged_calls import MergedCalls, Merging
from gpu_manager.worker.merging.merged_run import run_merged
from gpu_manager.worker.orders import Singly
from tests.kit.waiting import wait_until
from tests.kit.worlds.caller import CallFailed, LocalWorker, program, step
from tests.unit.gpu_manager.worker.merging.crowd import FIRST_LEASE, Crowd, merging_pays
from torch_shim.wire.messages import Arithmetic
from torch_shim.wire.programs import Constant, Named, Program, Ref, Slice, Tuple, digest_of
from torch_shim.wire.protocol import FrameKind

F = "t:torch.nn.functional."
SIZE = 8
MOST_S = 120.0  # for what happens by chance
W, B = torch.randn(16, 8), torch.randn(16)
LAYER = program(
    step(F + "linear", Ref(0), Ref(1), Ref(2)), step("m:relu", Ref(3)), inputs=3, output=[Ref(4)]
)
TABLE = torch.randn(10, 4)
LOOKUP = program(step(F + "embedding", Ref(0), Ref(1)), inputs=2, output=[Ref(2)])


def some(count: int = SIZE, shape: tuple[int, ...] = (1, 8)) -> list[torch.Tensor]:
    return [torch.randn(shape) for _ in range(count)]


def paying(*weights: torch.Tensor, **more: Any) -> LocalWorker:
    """A worker with whom running as one always pays."""
    return merging_pays(LocalWorker(*weights, features=[Merging], **more))


def merged(worker: LocalWorker) -> tuple[int, int]:
    counts = worker.part(MergedCalls).counts
    return counts.groups, counts.calls


def singly(worker: LocalWorker) -> dict[Singly, int]:
    return dict(+worker.part(MergedCalls).counts.singly)


def test_calls_run_as_one_and_each_gets_its_result_when_it_was_compared_and_pays() -> None:
    worker = paying(W, B)
    with Crowd(worker, SIZE) as crowd:
        crowd.bind(LAYER, [W, B])
        crowd.learn(LAYER, some())
        before, xs = merged(worker), some()
        found = crowd.call(LAYER, xs)
        assert merged(worker) == (before[0] + 1, before[1] + SIZE)
    for x, (y,) in zip(xs, found, strict=True):
        torch.testing.assert_close(y, torch.relu(x @ W.T + B))
    assert worker.part(MergedCalls).counts.compared >= 2 * SIZE
    wait_until(lambda: len(worker.ran) == 5 * SIZE, "each call is reported, after its answer")


def test_each_of_merged_calls_computes_for_its_part_of_the_time() -> None:
    worker = paying(W, B)
    with Crowd(worker, SIZE) as crowd:
        crowd.bind(LAYER, [W, B])
        crowd.learn(LAYER, some())
        replies = [each.result() for each in crowd.begin(LAYER, some())]
    computed = [reply.meta.times[2] for reply in replies]
    assert sum(computed) >= 0.02
    assert computed == pytest.approx([computed[0]] * SIZE)
    assert all(reply.meta.times[0] >= sum(computed) - computed[0] for reply in replies)


def test_a_poisoned_call_fails_alone_when_it_runs_with_others() -> None:
    worker = paying(TABLE)
    good = [torch.tensor([n % 10, 3]) for n in range(SIZE)]
    with Crowd(worker, SIZE) as crowd:
        crowd.bind(LOOKUP, [TABLE])
        crowd.learn(LOOKUP, good)
        before = merged(worker)
        found = crowd.call(LOOKUP, [*good[:3], torch.tensor([1, 99]), *good[4:]])
        poisoned = found.pop(3)
        assert isinstance(poisoned, CallFailed)
        assert poisoned.failure == "operator failed"
        assert "IndexError" in poisoned.message
        for x, (y,) in zip(good[:3] + good[4:], found, strict=True):
            assert torch.equal(y, TABLE[x])
        assert merged(worker) == before
        assert singly(worker)[Singly.FAILED] == SIZE
        crowd.call(LOOKUP, good)
        assert merged(worker) == (before[0] + 1, before[1] + SIZE)


def test_a_poisoned_call_fails_alone_when_the_first_group_is_compared() -> None:
    worker = paying(TABLE)
    good = [torch.tensor([n % 10, 3]) for n in range(SIZE)]
    with Crowd(worker, SIZE) as crowd:
        crowd.bind(LOOKUP, [TABLE])
        crowd.call(LOOKUP, good[:1])
        found = crowd.call(LOOKUP, [torch.tensor([99, 1]), *good[1:]])
    assert isinstance(found[0], CallFailed)
    for x, (y,) in zip(good[1:], found[1:], strict=True):
        assert torch.equal(y, TABLE[x])


# One input, and a constant that it writes to.
COUNTS = program(
    step("m:add_", Ref(1), 1),
    step("m:add", Ref(0), Ref(1)),
    output=[Ref(3)],
    constants=(Constant("float32", (4,), bytes(16)),),
)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (COUNTS, Singly.WRITES),
        (
            program(step("m:mul", Ref(0), 2), step("m:view", Ref(1), -1), output=[Ref(1), Ref(2)]),
            Singly.ALIASES,
        ),
        (program(step("m:sum", Ref(0)), step("b:float", Ref(1)), output=[Ref(2)]), Singly.VALUES),
        (program(step("m:nonzero", Ref(0)), output=[Ref(1)]), Singly.VALUES),
        (program(step("t:torch.histc", Ref(0), 3), output=[Ref(1)]), Singly.NO_RULE),
        (program(step("t:torch.rand", 4), output=[Ref(1)]), Singly.RANDOM),
    ],
    ids=["constant", "two_views", "item", "nonzero", "loop", "random"],
)
def test_calls_run_singly_for_good_when_they_cannot_run_as_one(what: Program, why: Singly) -> None:
    worker = paying()
    with Crowd(worker, 4) as crowd:
        for _ in range(4):
            xs = some(4, (4,))
            assert all(isinstance(outcome, list) for outcome in crowd.call(what, xs))
    assert merged(worker) == (0, 0)
    assert singly(worker)[why] > 3


def test_a_program_is_not_blamed_when_torch_loops_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str] = []

    def elsewhere() -> None:
        torch.func.vmap(lambda x: torch.histc(x, 3))(torch.randn(2, 4))
        warnings.warn("of another thread", stacklevel=1)

    def run_beside(*arguments: Any) -> Any:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return run_merged(*arguments)

    monkeypatch.setattr(group_runs, "run_merged", run_beside)
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_, **__: shown.append(str(text)))
    warnings.filterwarnings("always", "of another thread")
    worker = paying()
    with Crowd(worker, 4) as crowd:
        double = program(step("m:mul", Ref(0), 2), output=[Ref(1)])
        crowd.learn(double, some(4, (4,)))
        crowd.call(double, some(4, (4,)))
    assert merged(worker)[0] > 0
    assert Singly.NO_RULE not in singly(worker)
    assert set(shown) == {"of another thread"}


@pytest.mark.parametrize("still", [False, True])
def test_a_loop_is_heard_when_warnings_were_silenced_meanwhile(*, still: bool) -> None:
    loop = program(step("t:torch.histc", Ref(0), 3), output=[Ref(1)])
    double = program(step("m:mul", Ref(0), 2), output=[Ref(1)])
    with contextlib.ExitStack() as silence:
        silence.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        worker = paying()
        with Crowd(worker, 4) as crowd:
            crowd.learn(double, some(4, (4,)))
            warnings.simplefilter("ignore")
            if not still:
                silence.close()
            for _ in range(4):
                crowd.call(loop, some(4, (4,)))
        assert singly(worker)[Singly.NO_RULE] > 3


def test_constants_stay_as_they_were_when_calls_that_write_to_them_wait_together() -> None:
    worker = paying()
    with Crowd(worker, 4) as crowd:
        for _ in range(3):
            xs = some(4, (4,))
            for x, (y,) in zip(xs, crowd.call(COUNTS, xs), strict=True):
                torch.testing.assert_close(y, x + 1)


def test_a_program_is_never_merged_again_when_its_results_differ() -> None:
    chaos = program(
        step("m:matmul", Ref(0), Ref(1)), step("m:mul", Ref(2), 1e7), step("m:sin", Ref(3)),
        inputs=2, output=[Ref(4)],
    )  # fmt: skip
    wide = torch.randn(513, 515)
    worker = paying(wide)
    with Crowd(worker, 4) as crowd:
        crowd.bind(chaos, [wide])
        for _ in range(5):
            crowd.call(chaos, some(4, (513,)))
    assert merged(worker) == (0, 0)
    assert singly(worker)[Singly.DIFFERS] > 4


def test_only_calls_of_equal_shapes_and_weights_run_as_one() -> None:
    worker = paying(W, B)
    with Crowd(worker, SIZE) as crowd:
        crowd.bind(LAYER, [W, B])
        crowd.learn(LAYER, some())
        before = merged(worker)
        xs = some(4) + some(4, (3, 8))
        for x, (y,) in zip(xs, crowd.call(LAYER, xs), strict=True):
            torch.testing.assert_close(y, torch.relu(x @ W.T + B))
        assert merged(worker)[1] - before[1] in {0, 4}


def test_outputs_are_laid_out_as_those_of_a_single_call() -> None:
    what = program(
        step("m:transpose", Ref(0), 0, 1),
        step("m:mul", Ref(1), 2),
        step("m:mul", Ref(0), 3),
        step("o:getitem", Ref(3), Tuple([Slice(None, None, None), 1])),
        step("t:torch.ones", 2),
        output=[Ref(2), Ref(4), Ref(5), 7, None, True],
    )
    worker = paying()
    with Crowd(worker, 4) as crowd:
        crowd.learn(what, some(4, (3, 4)))
        before, xs = merged(worker), some(4, (3, 4))
        replies = [each.result() for each in crowd.begin(what, xs)]
        assert merged(worker)[1] == before[1] + 4
    for x, reply in zip(xs, replies, strict=True):
        first, second, ones, *plain = reply.outputs
        assert torch.equal(first, x.T * 2)
        assert torch.equal(second, (x * 3)[:, 1])
        assert torch.equal(ones, torch.ones(2))
        assert plain == [7, None, True]
        assert first.stride() == (x.T * 2).stride()
        assert sum(reply.sizes) <= 3 * 4 * 4 + 3 * 4 + 2 * 4


@pytest.mark.parametrize("rounds", [1, 4], ids=["compared", "merged"])
def test_a_call_whose_lease_has_ended_is_refused_alone(rounds: int) -> None:
    worker = paying(W, B)
    with Crowd(worker, SIZE) as crowd:
        crowd.bind(LAYER, [W, B])
        crowd.learn(LAYER, some(), rounds)
        xs = some()
        calls = crowd.begin(LAYER, xs, lambda: worker.leases.end(FIRST_LEASE + 2))
        errors = [each.exception() for each in calls]
        refused = errors.pop(2)
        assert isinstance(refused, CallFailed)
        assert refused.failure == "lease not in force"
        assert errors == [None] * (SIZE - 1)
        for number, (x, call) in enumerate(zip(xs, calls, strict=True)):
            if number != 2:
                torch.testing.assert_close(call.result().outputs[0], torch.relu(x @ W.T + B))
    assert worker.ended == [FIRST_LEASE + 2]


def test_others_get_their_results_when_a_client_leaves_in_mid_batch() -> None:
    worker = paying(W, B)
    with Crowd(worker, SIZE) as crowd:
        crowd.bind(LAYER, [W, B])
        crowd.learn(LAYER, some())
        before, xs = merged(worker), some()
        calls = crowd.begin(LAYER, xs, lambda: crowd.callers[3].wire.socket.shutdown(2))
        assert calls[3].exception() is not None
        for number, (x, call) in enumerate(zip(xs, calls, strict=True)):
            if number != 3:
                torch.testing.assert_close(call.result().outputs[0], torch.relu(x @ W.T + B))
        assert merged(worker)[1] == before[1] + SIZE
    worker.join()


def test_calls_run_singly_when_a_group_would_take_too_much_memory() -> None:
    # One takes 48 MiB less than the limit, two take 64 MiB more: a need looks smaller where the
    # system takes idle pages away meanwhile.
    copies = (112 << 20) // 4 // 4
    grows = program(step("m:repeat", Ref(0), copies), step("m:sum", Ref(1)), output=[Ref(2)])
    worker = paying(limit_bytes=160 << 20)
    turn, until_s = 0, time.monotonic() + MOST_S
    with Crowd(worker, 4) as crowd:
        # By chance fewer than all of them come together.
        while turn < 6 or (Singly.MEMORY not in singly(worker) and time.monotonic() < until_s):
            turn += 1
            xs = [torch.full((4,), float(n)) for n in range(4)]
            for x, (y,) in zip(xs, crowd.call(grows, xs), strict=True):
                torch.testing.assert_close(y, x.sum() * copies)
    assert not worker.pressures
    groups, calls = merged(worker)
    assert calls <= 3 * groups  # only groups of fewer than all four fit
    assert singly(worker)[Singly.MEMORY] > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([None, None, [], None, "", None, None, True], Singly.REPEATED),
        ([None, None, [], None, "", list(Arithmetic(deterministic=2))], Singly.EXACT),
    ],
)
def test_calls_run_singly_when_they_ask_for_it(options: list[Any], why: Singly) -> None:
    worker = paying(W, B)
    with Crowd(worker, 4) as crowd:
        crowd.bind(LAYER, [W, B])
        crowd.learn(LAYER, some(4))
        before, xs = merged(worker), some(4)
        found = crowd.call(LAYER, xs, options=options)
        for x, (y,) in zip(xs, found, strict=True):
            torch.testing.assert_close(y, torch.relu(x @ W.T + B))
        assert merged(worker) == before
        assert singly(worker)[why] >= 3


@pytest.mark.parametrize(("most", "groups"), [(1, 0), (4, 2)])
def test_groups_are_no_larger_than_allowed(most: int, groups: int) -> None:
    worker = paying(W, B)
    worker.part(MergedCalls).most = most
    with Crowd(worker, SIZE) as crowd:
        crowd.bind(LAYER, [W, B])
        crowd.learn(LAYER, some())
        before = merged(worker)
        crowd.call(LAYER, some())
        assert merged(worker) == (before[0] + groups, before[1] + 4 * groups)


def test_outputs_that_stay_belong_to_their_call_alone() -> None:
    worker = paying(W, B)
    with Crowd(worker, 4) as crowd:
        crowd.bind(LAYER, [W, B])
        crowd.learn(LAYER, some(4))
        before, xs = merged(worker), some(4)
        crowd.call(LAYER, xs, options=[None, None, [], None, "", None, [1000, 1, {}, []]])
        assert merged(worker)[1] == before[1] + 4
        kept = worker.executor.sessions.sole()
        assert sorted(each.storage.nbytes() for each in kept) == [16 * 4] * 4
        for caller, x in zip(crowd.callers, xs, strict=True):
            frame = caller.ask(FrameKind.FETCH, [1000, 0])
            (descriptor,) = frame.descriptors
            found = torch.frombuffer(bytearray(os.read(descriptor, 64)), dtype=torch.float32)
            os.close(descriptor)
            torch.testing.assert_close(found, torch.relu(x @ W.T + B)[0])


def test_calls_of_a_program_that_an_earlier_worker_forbade_run_singly() -> None:
    worker = paying(W, B)
    worker.part(MergedCalls).counts.forbid(digest_of(LAYER.pack()), Singly.DIFFERS)
    with Crowd(worker, 4) as crowd:
        crowd.bind(LAYER, [W, B])
        crowd.learn(LAYER, some(4))
    assert merged(worker) == (0, 0)
    assert set(singly(worker)) == {Singly.DIFFERS}
    assert not worker.part(MergedCalls).counts.compared


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_group_computes_in_float32_when_one_before_failed_in_autocast(autocast: Any) -> None:
    """The program leaves autocast unless a matrix is singular."""
    amp, half = "t:torch.amp.autocast_mode.", Named("dtype", "bfloat16")
    what = program(
        step(f"{amp}_enter_autocast", "cuda", half, True, None),
        step("t:torch.linalg.inv", Ref(0)),
        step(f"{amp}_exit_autocast", Ref(1)),
        output=[Ref(2)],
    )
    product = program(step("o:matmul", Ref(0), Ref(0)), output=[Ref(1)])
    good, bad = torch.eye(4), torch.zeros(4, 4)
    with Crowd(merging_pays(LocalWorker(features=[Merging])), 3) as crowd:
        for _ in range(6):
            crowd.call(what, [good, bad, good], options=(autocast, None, [], None))
            for (found,) in crowd.call(product, [torch.randn(4, 4)] * 3):
                assert found.dtype is torch.float32
