"""Traces at the workers: a call may name one."""

from typing import Any

import pytest
import torch

from tests.kit.worlds.caller import LEASE, CallFailed, LocalWorker, program, step
from torch_shim.wire.programs import Ref
from torch_shim.wire.protocol import FrameKind

pytestmark = pytest.mark.timeout(180, func_only=True)

SAID = f"00-{32 * 'a'}-{16 * 'b'}-01"
DOUBLE = program(step("o:add", Ref(0), Ref(0)), inputs=1, output=[Ref(1)])


@pytest.mark.parametrize("trace", [(SAID,), ("",)])
def test_call_is_run_with_a_trace_and_without(trace: tuple[str, ...]) -> None:
    with LocalWorker().connect() as caller:
        x = torch.ones(4)
        reply = caller.call(DOUBLE, x, options=(None, None, [], None, *trace))
        assert torch.equal(reply.outputs[0], x + x)


def test_note_of_a_worker_names_the_trace_of_the_call_before() -> None:
    worker = LocalWorker()
    with worker.connect() as caller:
        caller.call(DOUBLE, torch.ones(4), options=(None, None, [], None, SAID))
        caller.wire.send(FrameKind.HELLO, [])
        worker.join()
    assert "HELLO on a data channel" in worker.notes[0]
    assert worker.traces == [SAID]


@pytest.mark.parametrize("trace", [(7,), ("x" * 129,), (None,)])
def test_call_is_refused_with_options_that_are_none(trace: tuple[object, ...]) -> None:
    with LocalWorker().connect() as caller, pytest.raises(CallFailed) as failed:
        caller.call(DOUBLE, torch.ones(4), options=(None, None, [], None, *trace))
    assert failed.value.failure == "bad frame"


def test_worker_says_how_much_of_the_transfer_was_the_way_back() -> None:
    with LocalWorker().connect() as caller:
        number = caller.define(DOUBLE)
        meta: list[Any] = [LEASE, number, None, [3], []]
        times = caller.ask(FrameKind.CALL, meta).meta.times
        waited_s, transfer_s, compute_s, back_s = times
        assert waited_s >= 0 < compute_s
        assert 0 < back_s <= transfer_s
