"""Operators with a meaning of their own in a worker: CUDA's numbers, and no memory of others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_manager.worker.program.allowed_operators import OperatorTable

TABLE = OperatorTable(torch.device("cpu"))
F = torch.nn.functional


def _operator(name: str) -> Callable[..., Any]:
    found = TABLE.find(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "name", ["m:histc", "t:torch.histc", "a:aten::histc", "a:aten::histc.default"]
)
def test_emulated_gpu_counts_integers_when_the_cpu_has_no_kernel(name: str) -> None:
    counts = _operator(name)(torch.tensor([0, 3, 3, 1, 9], dtype=torch.int32), 4, 0, 3)
    assert counts.tolist() == [1, 1, 0, 2]
    assert counts.dtype is torch.int32


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_emulated_gpu_transforms_halves_when_the_cpu_has_no_kernel() -> None:
    values = torch.randn(8).half()
    found = _operator("t:torch.fft.rfft")(values)
    assert found.dtype is torch.complex32
    assert torch.allclose(found.to(torch.complex64), torch.fft.rfft(values.float()), atol=1e-2)


def test_gpu_keeps_its_own_kernels_when_it_is_real() -> None:
    found = OperatorTable(torch.device("cuda", 0)).find("m:histc")
    with pytest.raises(NotImplementedError, match="histogram_cpu"):
        found(torch.arange(4))  # type: ignore[misc] # the name is on the list


@pytest.mark.parametrize(
    "name", ["t:torch.nn.functional.grouped_mm", "a:aten::_grouped_mm.default"]
)
@pytest.mark.parametrize("shapes", [((8, 16), (3, 16, 8)), ((3, 8, 16), (16, 8)), ((8, 8), (8, 8))])
def test_grouped_product_is_torchs_when_the_offsets_are_valid(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    first, second = (torch.randn(shape).bfloat16() for shape in shapes)
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    found = _operator(name)(first, second, offs=ends)
    torch.testing.assert_close(found, F.grouped_mm(first, second, offs=ends))


@pytest.mark.parametrize("ends", [[-5, 4, 1], [2, 900, 3], [9, 9, 9]])
def test_grouped_product_stays_within_its_tensors_when_the_offsets_lie(ends: list[int]) -> None:
    first, second = torch.ones(4, 2), torch.ones(3, 2, 5)
    offsets = torch.tensor(ends, dtype=torch.int32)
    for name in ("a:transformers::grouped_mm_fallback.default", "t:torch._grouped_mm"):
        try:
            found = _operator(name)(first, second, offsets)
        except RuntimeError:
            continue
        assert found.shape == (4, 5)
        assert set(found.flatten().tolist()) <= {0.0, 2.0}


def test_grouped_product_leaves_zeros_when_rows_have_no_group() -> None:
    ends = torch.tensor([1, 2], dtype=torch.int32)
    found = _operator("a:transformers::grouped_mm_fallback")(
        torch.ones(4, 2), torch.ones(2, 2, 3), ends
    )
    assert found.tolist() == [[2.0] * 3] * 2 + [[0.0] * 3] * 2


@pytest.mark.parametrize(
    "name", ["m:exp", "t:torch.exp", "a:aten::exp.default", "m:sum", "m:pow", "o:pow"]
)
def test_emulated_gpu_computes_in_float32_what_cudas_autocast_does(name: str) -> None:
    arguments = [torch.ones(4).bfloat16(), 2][: 1 + name.endswith("pow")]
    with torch.autocast("cpu", torch.bfloat16):
        assert _operator(name)(*arguments).dtype is torch.float32
        assert _operator("m:relu")(arguments[0]).dtype is torch.bfloat16
    assert _operator(name)(*arguments).dtype is torch.bfloat16


def test_emulated_gpu_writes_the_given_tensor_when_autocast_is_on() -> None:
    written = torch.zeros(2).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert _operator("t:torch.exp")(torch.zeros(2).bfloat16(), out=written) is written
    assert written.tolist() == [1.0, 1.0]
