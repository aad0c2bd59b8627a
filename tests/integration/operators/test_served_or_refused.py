"""What only CUDA has kernels for: all of it is served or refused by name."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kit.places import ROOT
from torch_shim.errors import UnsupportedCall
from torch_shim.kernels.substitution import find, has_substitute, with_substitute


def test_every_missing_kernel_has_a_substitute_with_right_numbers() -> None:
    program = "tests.integration.operators.whole_table"
    done = subprocess.run(
        [sys.executable, "-m", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *failures, agreed = done.stdout.splitlines()
    assert failures == []
    assert int(agreed.split()[0]) > 700


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch registers no kernels of CUDA")
def test_every_operator_of_cuda_alone_is_served_or_refused_by_name() -> None:
    dispatcher: Any = torch._C  # noqa: SLF001 - torch has no public list of its kernels
    has = dispatcher._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001 - see above
    on_cpu = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    names = {
        name.partition("::")[2].partition(".")[0]
        for name in dispatcher._dispatch_get_all_op_names()  # noqa: SLF001 - see above
        if name.startswith("aten::") and has(name, "CUDA") and not any(map(has, [name] * 3, on_cpu))
    }
    names = {name for name in names if "miopen" not in name} - {"record_stream"}
    assert len(names) > 50
    assert sorted(name for name in names if not has_substitute(name)) == []


@pytest.mark.parametrize(
    ("recipe", "scales"),
    [(0, (torch.tensor(2.0), torch.tensor(0.5))), (1, (torch.rand(4, 1), torch.rand(1, 8)))],
)
@pytest.mark.parametrize("bias", [None, torch.ones(8, dtype=torch.bfloat16)])
def test_scaled_product_is_right_when_tensors_or_rows_have_scales(
    recipe: int, scales: tuple[torch.Tensor, ...], bias: torch.Tensor | None
) -> None:
    first, second = torch.randn(4, 16).to(_FLOAT8), torch.randn(8, 16).to(_FLOAT8).t()
    arguments = _scaled(first, second, recipe, scales, bias, torch.float32)
    expected = (first.float() * scales[0]) @ (second.float() * scales[1])
    expected = expected if bias is None else expected + bias
    for compute in (with_substitute(_SCALED, "_scaled_mm_v2"), _substitute(arguments)):
        torch.testing.assert_close(compute(*arguments), expected)


def test_scaled_product_is_refused_when_blocks_have_scales() -> None:
    factor = torch.ones(16, 16).to(_FLOAT8)
    arguments = _scaled(factor, factor.t(), 3, (torch.ones(16),) * 2, None, None)
    with pytest.raises(UnsupportedCall, match=r"scaled_mm with scales of blocks.*rows"):
        _substitute(arguments)(*arguments)


_FLOAT8 = torch.float8_e4m3fn
_SCALED: Any = torch.ops.aten._scaled_mm_v2  # noqa: SLF001 - what the public `scaled_mm` calls


def _scaled(
    first: torch.Tensor,
    second: torch.Tensor,
    recipe: int,
    scales: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Any, ...]:
    a, b = scales
    return first, second, [a], [recipe], [], [b], [recipe], [], bias, dtype


def _substitute(arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The substitute itself: newer torch has a kernel of the CPU's before it."""
    found = find("_scaled_mm_v2", arguments, {})
    assert found is not None
    return lambda *given: found(_SCALED, given, {})


def test_refusal_names_operator_and_remedy_when_there_is_no_substitute() -> None:
    with pytest.raises(UnsupportedCall, match=r"torch\.ops\.aten\.batch_norm_stats.*public"):
        with_substitute(torch.batch_norm_stats, "batch_norm_stats")(torch.ones(2, 3, 4), 1e-5)


def test_error_is_the_cpus_own_when_the_arguments_are_wrong() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        with_substitute(torch.mm, "mm")(torch.ones(2, 3), torch.ones(2, 3))
