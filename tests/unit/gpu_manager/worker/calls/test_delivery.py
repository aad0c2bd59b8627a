"""The delivery of one answer: its file is the function's once the answer is sent, not before."""

import contextlib
import os

import pytest

from gpu_manager.emulated.cpu_arithmetic import CpuArithmetic
from gpu_manager.worker.channel_server import Delivery
from gpu_manager.worker.shared_memory import (
    LEAST_FILE_BYTES,
    MOST_FILE_BYTES,
    ByteBudget,
    ResultFiles,
)


@pytest.mark.parametrize("fails", [False, True])
def test_file_is_taken_back_when_the_answer_is_not_sent(*, fails: bool) -> None:
    files = ResultFiles(ByteBudget(MOST_FILE_BYTES))
    delivery = Delivery(CpuArithmetic(), memoryview(bytearray(64)), files, files.give)
    with contextlib.suppress(InterruptedError), delivery:
        assert len(delivery.room(LEAST_FILE_BYTES)) >= LEAST_FILE_BYTES
        (descriptor,) = delivery.descriptors
        assert delivery.file_number
        if fails:
            raise InterruptedError
    assert files.any_free is fails
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_nothing_is_taken_back_when_there_was_no_file() -> None:
    taken: list[int] = []
    delivery = Delivery(CpuArithmetic(), memoryview(bytearray(64)), None, taken.append)
    delivery.room(LEAST_FILE_BYTES)
    with pytest.raises(InterruptedError), delivery:
        raise InterruptedError
    assert not taken
