"""What only CUDA has kernels for: all of it is served or refused by name."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.kit.places import ROOT
from torch_shim.errors import UnsupportedCall
from torch_shim.missing_kernels.substitution import has_substitute, with_substitute


def test_every_missing_kernel_has_a_substitute_with_right_numbers() -> None:
    program = "tests.unit.torch_shim.missing_kernels.whole_table"
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


def test_refusal_names_operator_and_remedy_when_there_is_no_substitute() -> None:
    with pytest.raises(UnsupportedCall, match=r"torch\.ops\.aten\.batch_norm_stats.*public"):
        with_substitute(torch.batch_norm_stats, "batch_norm_stats")(torch.ones(2, 3, 4), 1e-5)


def test_error_is_the_cpus_own_when_the_arguments_are_wrong() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        with_substitute(torch.mm, "mm")(torch.ones(2, 3), torch.ones(2, 3))
