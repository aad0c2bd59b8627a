"""What the operators of a program read, write and compute, counted in one of its runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

# An operator whose tensors take more than this leaves nothing of them in a cache.
_CACHE_BYTES = 1 << 20

# Whether it is one of vmap's or grad's, which has no memory of its own.
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001 - torch's own has no other name

Run = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]


class OperatorCounts:
    """Sums over the operators of one run; what only looks at memory in another way moves none.

    `far_bytes` are those of operators that are too large for a cache. `arithmetic` counts a
    multiplication and an addition as two, and of other operators each number that they give.
    """

    def __init__(self) -> None:
        self.operators = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self.far_bytes = 0
        self.arithmetic = 0

    def add(self, name: str, arguments: Sequence[Any], given: Any) -> None:
        """One operator was called with these, and gave this."""
        read = _tensors(arguments)
        written = _tensors(given if isinstance(given, (list, tuple)) else (given,))
        if not written:
            return
        self.operators += 1
        places = {tensor.untyped_storage().data_ptr() for tensor in read}
        fresh = [one for one in written if one.untyped_storage().data_ptr() not in places]
        if not fresh and not name.endswith("_"):
            return
        read_bytes = sum(tensor.nbytes for tensor in read)
        written_bytes = sum(tensor.nbytes for tensor in fresh or written)
        self.read_bytes += read_bytes
        self.written_bytes += written_bytes
        if read_bytes + written_bytes > _CACHE_BYTES:
            self.far_bytes += read_bytes + written_bytes
        self.arithmetic += _arithmetic(name, read, written[0])


def counting(run: Run, operators: Mapping[str, str], counts: OperatorCounts) -> Run:
    """The same function, with its operators counted; these are some of the names in its globals."""
    assert isinstance(run, FunctionType)
    space = dict(run.__globals__)
    for name, operator in operators.items():
        space[name] = _counted(space[name], _short(operator), counts)
    counted: Run = FunctionType(run.__code__, space)
    return counted


def _counted(call: Callable[..., Any], name: str, counts: OperatorCounts) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        given = call(*arguments, **named)
        counts.add(name, arguments, given)
        return given

    return run


def _short(operator: str) -> str:
    """Its name alone: `add` of `a:aten::add.Tensor`, `linear` of `t:torch._C._nn.linear`."""
    _, _, name = operator.partition(":")
    if "::" in name:
        return name.partition("::")[2].partition(".")[0]
    return name.rpartition(".")[2]


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return [tensor for tensor in found if not _is_wrapped(tensor)]


def _arithmetic(name: str, read: Sequence[torch.Tensor], given: torch.Tensor) -> int:
    """By the shapes; of convolutions and products what they sum up for each number they give."""
    numbers = given.numel()
    if len(read) < 2:  # noqa: PLR2004 - two factors
        return numbers
    if name.startswith("conv"):
        return 2 * numbers * math.prod(read[1].shape[1:])
    if name == "scaled_dot_product_attention" and read[1].dim() > 1:
        return 4 * read[0].numel() * read[1].shape[-2]
    inner = {"linear": 1, "matmul": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}.get(name)
    if inner is None or not read[inner].dim():
        return numbers
    return 2 * numbers * int(read[inner].shape[-1])
