"""The settings of torch that change how a GPU computes, as they travel with a call."""

from typing import Literal, cast

import torch

# What torch's public settings ask, which take several times as long: every call asks them all.
from torch._C import _get_cudnn_allow_tf32 as _allows_tf32
from torch._C import _get_cudnn_benchmark as _benchmarks
from torch._C import _get_cudnn_deterministic as _is_cudnn_deterministic
from torch._C import _get_deterministic_algorithms as _is_deterministic
from torch._C import _get_deterministic_algorithms_warn_only as _only_warns
from torch._C import _get_float32_matmul_precision as _matmul_precision

from torch_shim.wire.messages import Arithmetic


def arithmetic_in_force() -> Arithmetic:
    """This process's settings; RuntimeError where torch's two interfaces to tf32 are mixed."""
    deterministic = (1 if _only_warns() else 2) if _is_deterministic() else 0
    matmul = cast(Literal["highest", "high", "medium"], _matmul_precision())
    switches = _allows_tf32(), _benchmarks(), _is_cudnn_deterministic()
    return Arithmetic(matmul, *switches, deterministic)


def use_arithmetic(wanted: Arithmetic) -> None:
    torch.set_float32_matmul_precision(wanted.matmul)
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32 = wanted.cudnn_tf32
    cudnn.benchmark = wanted.cudnn_benchmark
    cudnn.deterministic = wanted.cudnn_deterministic
    # The public function sets the compiler as well, which it imports for that: nothing is compiled
    # where this runs, and a worker may not be able to read further modules.
    torch._C._set_deterministic_algorithms(  # noqa: SLF001 - see above
        wanted.deterministic > 0, warn_only=wanted.deterministic == 1
    )
