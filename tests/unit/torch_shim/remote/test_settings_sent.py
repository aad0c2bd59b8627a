"""Whether a call carries the function's settings of arithmetic, or is refused with words."""

from collections.abc import Iterator

import pytest
import torch

from torch_shim.errors import RemoteFailure
from torch_shim.remote.call_settings import arithmetic_to_send
from torch_shim.wire.protocol import FailureKind


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.backends.cudnn.benchmark = False


def test_nothing_is_sent_when_settings_are_the_usual_ones() -> None:
    assert arithmetic_to_send(taken=False) is None


def test_settings_are_sent_when_the_function_has_changed_them() -> None:
    torch.backends.cudnn.benchmark = True
    assert arithmetic_to_send(taken=True) == ["highest", True, True, False, 0]


def test_call_is_refused_with_words_when_workers_take_no_settings() -> None:
    torch.backends.cudnn.benchmark = True
    with pytest.raises(RemoteFailure, match="take no settings") as refused:
        arithmetic_to_send(taken=False)
    assert refused.value.failure == FailureKind.OPERATOR  # the function computes it itself
