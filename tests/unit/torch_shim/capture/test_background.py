"""Traces in the background: what is told of one that fails, and what follows it."""

import threading

import pytest

from tests.kit.waiting import PATIENCE_S
from torch_shim.capture.traces.background import BackgroundTracer
from torch_shim.errors import GpuQueueFull, GpuUnavailable, QuotaUsedUp


@pytest.mark.parametrize("error", [QuotaUsedUp("x"), GpuQueueFull("x"), GpuUnavailable("x")])
def test_trace_is_told_in_a_line_and_the_next_one_made_when_there_is_no_gpu_now(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def without_gpu() -> None:
        raise error

    tracer, next_one = BackgroundTracer(), threading.Event()
    with caplog.at_level("INFO", "gpufaas"):
        tracer.submit(without_gpu)
        tracer.submit(next_one.set)
        assert next_one.wait(PATIENCE_S)
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("INFO", None)]
