"""Settings of torch that change numbers: read, sent, refused, and computed with."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from torch_shim.wire.arithmetic import arithmetic_in_force, use_arithmetic
from torch_shim.wire.messages import Arithmetic

OTHER = Arithmetic("medium", False, True, True, 1)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = arithmetic_in_force()
    yield
    use_arithmetic(before)


def test_defaults_are_those_of_a_new_process() -> None:
    assert arithmetic_in_force() == Arithmetic()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch.set_float32_matmul_precision('high')", Arithmetic(matmul="high")),
        ("torch.backends.cuda.matmul.allow_tf32 = True", Arithmetic(matmul="high")),
        ("torch.backends.cudnn.allow_tf32 = False", Arithmetic(cudnn_tf32=False)),
        ("torch.backends.cudnn.benchmark = True", Arithmetic(cudnn_benchmark=True)),
        ("torch.backends.cudnn.deterministic = True", Arithmetic(cudnn_deterministic=True)),
        ("torch.use_deterministic_algorithms(True)", Arithmetic(deterministic=2)),
        ("torch.use_deterministic_algorithms(True, warn_only=True)", Arithmetic(deterministic=1)),
    ],
)
def test_setting_is_seen_when_a_function_changes_it(line: str, expected: Arithmetic) -> None:
    exec(line, {"torch": torch})
    assert arithmetic_in_force() == expected


def test_settings_are_the_same_after_they_have_travelled() -> None:
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(OTHER), type=Arithmetic)
    assert found == OTHER
    use_arithmetic(found)
    assert arithmetic_in_force() == OTHER


@pytest.mark.parametrize(
    "sent",
    [
        None,
        [*OTHER, 1],
        ["fast", True, False, False, 0],
        [7, True, False, False, 0],
        [["high"], True, False, False, 0],
        ["high", 1, False, False, 0],
        ["high", True, False, False, 3],
        ["high", True, False, False, True],
    ],
)
def test_settings_are_refused_when_there_are_no_such(sent: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Arithmetic)
