"""Whether a call carries the function's settings of arithmetic."""

from collections.abc import Iterator

import pytest
import torch

from torch_shim.wire import arithmetic
from torch_shim.wire.arithmetic import settings_to_send
from torch_shim.wire.messages import Arithmetic


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.backends.cudnn.benchmark = False


def test_nothing_is_sent_when_settings_are_the_usual_ones() -> None:
    assert settings_to_send()[2] is None


def test_settings_are_sent_when_the_function_has_changed_them() -> None:
    torch.backends.cudnn.benchmark = True
    assert settings_to_send()[2] == Arithmetic(cudnn_benchmark=True)


def test_settings_that_no_worker_computes_by_equal_none_that_were_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = arithmetic.settings_in_force()

    def mixed() -> str:
        raise RuntimeError("both interfaces to tf32 are in use")

    monkeypatch.setattr(arithmetic, "_matmul_precision", mixed)
    assert arithmetic.settings_in_force() == ()
    assert recorded
