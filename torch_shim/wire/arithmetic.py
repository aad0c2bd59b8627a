"""The settings of torch that change how a GPU computes, as they travel with a call."""

from typing import Any, NamedTuple

import torch

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
    cudnn = torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return Arithmetic(
        torch.get_float32_matmul_precision(),
        bool(cudnn.allow_tf32),
        bool(cudnn.benchmark),
        bool(cudnn.deterministic),
        (1 if warns else 2) if deterministic else 0,
    )


def use_arithmetic(wanted: Arithmetic) -> None:
    """Have this process compute so from now on."""
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
