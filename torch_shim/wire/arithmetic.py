"""The settings of torch that change how a GPU computes, as they travel with a call."""

from typing import Any, NamedTuple

import torch

# What torch's public settings ask, which take several times as long: every call asks them all.
from torch._C import _get_cudnn_allow_tf32 as _allows_tf32
from torch._C import _get_cudnn_benchmark as _benchmarks
from torch._C import _get_cudnn_deterministic as _is_cudnn_deterministic
from torch._C import _get_deterministic_algorithms as _is_deterministic
from torch._C import _get_deterministic_algorithms_warn_only as _only_warns
from torch._C import _get_float32_matmul_precision as _matmul_precision

_MATMUL = ("highest", "high", "medium")


class Arithmetic(NamedTuple):
    """The defaults are torch's own; a call with these sends nothing."""

    matmul: str = "highest"  # float32 matrix products: the others use tf32
    cudnn_tf32: bool = True
    cudnn_benchmark: bool = False
    cudnn_deterministic: bool = False
    deterministic: int = 0  # algorithms: 0 any, 1 a warning for others, 2 no others


def arithmetic_in_force() -> Arithmetic:
    """This process's settings; RuntimeError where torch's two interfaces to tf32 are mixed."""
    deterministic = (1 if _only_warns() else 2) if _is_deterministic() else 0
    return Arithmetic(
        _matmul_precision(), _allows_tf32(), _benchmarks(), _is_cudnn_deterministic(), deterministic
    )


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


def read_arithmetic(sent: Any) -> Arithmetic | None:
    """The settings that somebody else sent; None unless each is one that there is."""
    if not isinstance(sent, list) or len(sent) != len(Arithmetic._fields):
        return None
    matmul, *switches, deterministic = sent
    if matmul not in _MATMUL or not all(type(switch) is bool for switch in switches):
        return None
    if type(deterministic) is not int or not 0 <= deterministic <= 2:  # noqa: PLR2004 - the numbers above
        return None
    return Arithmetic(*sent)
