"""Which calls of a process run at the same time, and which wait for others."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.calls.calls_together import CallNeeds, CallsTogether
from tests.kit.waiting import PATIENCE_S, wait_until
from torch_shim.wire.arithmetic import arithmetic_in_force
from torch_shim.wire.messages import Arithmetic

PLAIN = CallNeeds(Arithmetic(), torch.float32, random=False)
ALONE = PLAIN._replace(alone=True)
RANDOM = PLAIN._replace(random=True)
DOUBLE = PLAIN._replace(default_dtype=torch.float64)
FAST = PLAIN._replace(arithmetic=Arithmetic(matmul="medium"))


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Every call leaves torch's default dtype as it was; arithmetic stays as the last call's."""
    before = arithmetic_in_force()
    yield
    assert torch.get_default_dtype() is torch.float32
    torch.set_float32_matmul_precision(before.matmul)


@contextmanager
def waiting(together: CallsTogether, needs: CallNeeds) -> Iterator[threading.Event]:
    """Another thread's call; the event is set when it runs."""
    runs = threading.Event()

    def call() -> None:
        with together.call(needs):
            runs.set()

    thread = threading.Thread(target=call)
    thread.start()
    yield runs
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("first", "second"), [(PLAIN, PLAIN), (PLAIN, RANDOM), (RANDOM, PLAIN), (DOUBLE, DOUBLE)]
)
def test_calls_run_together_when_they_agree(first: CallNeeds, second: CallNeeds) -> None:
    together = CallsTogether()
    with together.call(first), waiting(together, second) as runs:
        assert runs.wait(PATIENCE_S)


def test_a_call_that_becomes_alone_waits_for_others_and_lets_none_in() -> None:
    together = CallsTogether()
    before, it = together.call(PLAIN), together.call(PLAIN)
    before.__enter__()
    with waiting(together, ALONE) as alone_runs:
        assert not alone_runs.wait(0.1)
        before.__exit__(None, None, None)
        assert alone_runs.wait(PATIENCE_S)

    it.__enter__()
    together.become_alone(PLAIN)
    with waiting(together, PLAIN) as other_runs:
        assert not other_runs.wait(0.1)
        it.__exit__(None, None, None)
        assert other_runs.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("first", "second"), [(RANDOM, RANDOM), (PLAIN, DOUBLE), (DOUBLE, PLAIN), (PLAIN, FAST)]
)
def test_calls_wait_when_they_differ_in_what_the_process_has_once(
    first: CallNeeds, second: CallNeeds
) -> None:
    together = CallsTogether()
    with waiting_behind(together, first, second) as runs:
        assert runs.is_set()


@contextmanager
def waiting_behind(
    together: CallsTogether, first: CallNeeds, second: CallNeeds
) -> Iterator[threading.Event]:
    with together.call(first):
        other = waiting(together, second)
        runs = other.__enter__()
        assert not runs.wait(0.05)
    other.__exit__(None, None, None)
    yield runs


def test_a_call_has_the_settings_that_it_needs() -> None:
    together = CallsTogether()
    with together.call(DOUBLE):
        assert torch.get_default_dtype() is torch.float64
    with together.call(FAST):
        assert torch.get_float32_matmul_precision() == "medium"
    with together.call(PLAIN):
        assert torch.get_float32_matmul_precision() == "highest"


def test_nobody_overtakes_a_call_that_waits() -> None:
    together = CallsTogether()
    with together.call(PLAIN):
        other = waiting(together, DOUBLE)
        differs = other.__enter__()
        wait_until(lambda: len(together._waiting) == 1, "it is in line")  # noqa: SLF001 - the line
        late = waiting(together, PLAIN)
        agrees = late.__enter__()
        assert not agrees.wait(0.05)
        assert not differs.is_set()
    other.__exit__(None, None, None)
    late.__exit__(None, None, None)
    assert differs.is_set()
    assert agrees.is_set()


def test_others_run_while_a_call_waits_for_memory() -> None:
    together = CallsTogether()
    with (
        together.call(RANDOM),
        together.yielded(RANDOM),
        waiting(together, RANDOM) as runs,
    ):
        assert runs.wait(PATIENCE_S)


def test_a_dtype_that_cannot_be_the_default_is_refused_and_the_next_call_runs() -> None:
    together = CallsTogether()
    with pytest.raises(CallRefused), together.call(PLAIN._replace(default_dtype=torch.int32)):
        pytest.fail("it was let in")
    with together.call(PLAIN):
        pass
