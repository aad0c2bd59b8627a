"""Operators that mean something else in a worker than what torch itself does by that name."""

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._numpy as numpy
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch._higher_order_ops.flex_attention import flex_attention
from torch._numpy import _ufuncs
from torch._numpy._ndarray import ndarray

from gpu_manager.worker.program.argument_checks import short_name
from gpu_manager.worker.program.reviewed_operators import is_reviewed
from torch_shim.kernels import substitution

Operator = Callable[..., Any]

_PREDISPATCH = "t:torch._functorch.predispatch."
_FUNCTORCH = "t:torch._C._functorch."

_OF_TORCH = "tma"  # how names of functions, methods and registered operators begin
_POWER = "o:pow"  # Python's, which autocast knows of

# The product of mixture-of-experts layers; the last are transformers' own for other dtypes.
_GROUPED_PRODUCTS = (
    "t:torch.nn.functional.grouped_mm",
    "t:torch._grouped_mm",
    "a:aten::_grouped_mm",
    "a:aten::_grouped_mm.default",
    "a:transformers::grouped_mm_fallback",
    "a:transformers::grouped_mm_fallback.default",
)
# A view whose schema says nothing of that: it would have a version of its own.
_VIEWS_UNSAID = ("a:aten::_unsafe_view", "a:aten::_unsafe_view.default")


class Replacements:
    """The table of replaced operators for a worker whose GPU is `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def table(self) -> dict[str, Operator]:
        table: dict[str, Operator] = {
            "m:cuda": self._to_cuda,
            "m:requires_grad_": _same,
            "g:data": torch.Tensor.detach,  # shares the version counter, unlike `.data`
            "t:torch._C._set_grad_enabled": _nothing,
            "t:torch.autograd.grad_mode._enter_inference_mode": _nothing,
            "t:torch.autograd.grad_mode._exit_inference_mode": _nothing,
            "t:torch.amp.autocast_mode._enter_autocast": self._enter_autocast,
            "t:torch.amp.autocast_mode._exit_autocast": _exit_autocast,
        }
        table.update(_vmap_helpers())
        table.update(dict.fromkeys(_GROUPED_PRODUCTS, _grouped_product))
        table.update(dict.fromkeys(_VIEWS_UNSAID, torch.Tensor.view))
        return table

    def on_emulated_gpu(self, name: str, operator: Operator) -> Operator:
        """Return the operator; on an emulated GPU with what stands in for a kernel of CUDA's."""
        short = short_name(name)
        is_torchs = name[0] in _OF_TORCH or name == _POWER
        if self._device.type != "cpu" or not is_torchs or not substitution.has_substitute(short):
            return operator
        return substitution.with_substitute(operator, short)

    def _to_cuda(
        self,
        tensor: torch.Tensor,
        _device: object = None,
        _non_blocking: object = None,
        *,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        return tensor.to(self._device, memory_format=memory_format)

    def _enter_autocast(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: object = None,
        _cache_enabled: object = None,
    ) -> torch.autocast | None:
        """The mode that `_exit_autocast` leaves. That of the CPU concerns no tensor of a GPU.

        It keeps no casts: see `leave_modes`.
        """
        kind = str(device_type).partition(":")[0]
        if kind != "cuda" and self._device.type != "cuda":
            return None
        if kind == "cuda":
            kind, dtype = self._device.type, dtype or torch.get_autocast_dtype("cuda")
        mode = torch.autocast(kind, dtype, enabled is not False, cache_enabled=False)
        mode.__enter__()  # type: ignore[no-untyped-call] # torch gives it no types
        return mode


def _exit_autocast(mode: object) -> None:
    if isinstance(mode, torch.autocast):
        mode.__exit__(None, None, None)


def _same(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return tensor


def _nothing(*_: object) -> None:
    return None


def _add_batch_dim(tensor: torch.Tensor, dimension: int, level: int) -> torch.Tensor:
    dimension = tensor.ndim + dimension if dimension < 0 else dimension
    functorch = torch._C._functorch  # noqa: SLF001 - what torch.vmap itself calls
    added: torch.Tensor = functorch._add_batch_dim(tensor, dimension, level)  # noqa: SLF001 - as above
    return added


def _vmap_helpers() -> dict[str, Operator]:
    """What Dynamo leaves of `torch.vmap`: the calls that its body was wrapped in."""
    functorch = torch._C._functorch  # noqa: SLF001 - what torch.vmap itself calls
    table: dict[str, Operator] = {
        f"{_PREDISPATCH}lazy_load_decompositions": _nothing,
        "t:torch._functorch.vmap.lazy_load_decompositions": _nothing,
    }
    for space in (_PREDISPATCH, _FUNCTORCH):
        table[f"{space}_add_batch_dim"] = _add_batch_dim
        for name in ("_remove_batch_dim", "_vmap_increment_nesting", "_vmap_decrement_nesting"):
            table[f"{space}{name}"] = getattr(functorch, name)
    return table


def _grouped_product(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The products of the groups that `offs` ends; rows or columns of no group are zero.

    CUDA's kernel believes the offsets: it gets them ascending and within the tensor, without a
    word from the GPU. The products of other dtypes are computed one by one.
    """
    if bias is not None:
        raise RuntimeError("bias is not supported yet")  # as torch says
    if offs is None:
        product = first @ second
        return product if out_dtype is None else product.to(out_dtype)
    by_rows = (first.dim(), second.dim()) == (_MATRIX, _MATRICES)
    if by_rows and first.device.type == "cuda" and first.dtype is torch.bfloat16:
        ends = offs.clamp(0, len(first)).cummax(0).values.to(offs.dtype)
        made: torch.Tensor = torch._grouped_mm(first, second, ends, None, out_dtype)  # noqa: SLF001 - older torch has no public one
        rows = torch.arange(len(first), device=first.device)
        return made.masked_fill_((rows >= ends[-1]).unsqueeze(1), 0)
    return _products_one_by_one(first, second, offs.tolist(), out_dtype or first.dtype)


_MATRIX, _MATRICES = 2, 3


def _products_one_by_one(
    first: torch.Tensor, second: torch.Tensor, ends: list[int], dtype: torch.dtype
) -> torch.Tensor:
    ends = [max(0, end) for end in ends]
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if (first.dim(), second.dim()) == (_MATRIX, _MATRICES):  # a matrix for each group of rows
        made = first.new_zeros(len(first), second.shape[2], dtype=dtype)
        for number, (start, end) in enumerate(groups):
            made[start:end] = first[start:end] @ second[number]
    elif (first.dim(), second.dim()) == (_MATRICES, _MATRIX):  # one for each group of columns
        made = first.new_zeros(first.shape[1], second.shape[1], dtype=dtype)
        for number, (start, end) in enumerate(groups):
            made[:, start:end] = first[number] @ second[:, start:end]
    else:  # the groups are parts of the sums
        made = first.new_zeros(len(groups), len(first), second.shape[1], dtype=dtype)
        for number, (start, end) in enumerate(groups):
            made[number] = first[:, start:end] @ second[start:end]
    return made


# Operators that call parts of a program: loops, branches, scans, attention with own scores.
#
# They compute what torch's own of these names compute without gradients, over functions that were
# made of the program's reviewed steps.

Part = Callable[..., Any]

# A loop without end would keep the GPU; one beyond this bound runs on the function's processor.
_MOST_TURNS = 1 << 20


def higher_order_table() -> dict[str, Callable[..., Any]]:
    return {
        "h:cond": _cond,
        "h:while_loop": _while_loop,
        "h:scan": _scan,
        "h:associative_scan": _associative_scan,
        "h:map_impl": _map,
        "h:flex_attention": flex_attention,
    }


def _cond(predicate: Any, if_true: Part, if_false: Part, operands: Sequence[Any]) -> Any:
    return (if_true if predicate else if_false)(*operands)


def _while_loop(
    condition: Part, body: Part, carried: Sequence[Any], additional: Sequence[Any], **_: Any
) -> tuple[Any, ...]:
    turns = 0
    while condition(*carried, *additional):
        carried = body(*carried, *additional)
        turns += 1
        if turns > _MOST_TURNS:
            raise RuntimeError(f"a loop of more than {_MOST_TURNS} turns")
    return tuple(carried) if turns else tuple(map(_copied, carried))


def _scan(
    body: Part, first: Sequence[Any], rows: Sequence[Any], additional: Sequence[Any], **_: Any
) -> tuple[Any, ...]:
    carried, results = list(first), []
    for row in _rows(rows):
        found = body(*carried, *row, *additional)
        carried = list(found[: len(first)])
        results.append(found[len(first) :])
    return (*carried, *_stacked(results))


def _associative_scan(body: Part, leaves: Sequence[Any], additional: Sequence[Any]) -> list[Any]:
    found: list[Any] = generic_associative_scan(body, leaves, additional_inputs=additional)  # type: ignore[no-untyped-call] # torch gives it no types
    return found


def _map(body: Part, rows: Sequence[Any], additional: Sequence[Any], **_: Any) -> tuple[Any, ...]:
    return _stacked([body(*row, *additional) for row in _rows(rows)])


def _rows(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """The tensors' rows beside each other; there is at least one, or torch would not say how many
    results there are."""
    if any(len(tensor) > _MOST_TURNS for tensor in tensors):
        raise RuntimeError(f"a loop of more than {_MOST_TURNS} turns")
    rows = list(zip(*(tensor.unbind(0) for tensor in tensors), strict=True))
    if not rows:
        raise ValueError("a loop over no rows")
    return rows


def _stacked(results: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    columns = zip(*results, strict=True)
    return tuple(None if column[0] is None else torch.stack(column) for column in columns)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


# NumPy in programs: PyTorch's own functions of these names, which compute with tensors.
#
# Dynamo puts them into graphs in the place of NumPy's. Here are those that compute number by
# number, conversions of one number, and a few sums: each is made of operators that were reviewed.

_CONVERSIONS = (
    *("bool_", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"),
    *("complex64", "complex128"),
)
# Functions number by number that have another name in PyTorch; the others are reviewed by name.
_OTHERWISE_NAMED = ("degrees", "fabs", "mod", "power", "radians", "rint")
_FUNCTIONS = (
    *("abs", "all", "amax", "amin", "any", "arange", "array", "asarray", "clip", "concatenate"),
    *("cumsum", "full", "linspace", "max", "mean", "min", "ones", "prod", "reshape", "round"),
    *("stack", "std", "sum", "transpose", "var", "where", "zeros"),
)
_OPERATORS = (
    *("add", "and_", "eq", "floordiv", "ge", "gt", "invert", "le", "lt", "matmul", "mod", "mul"),
    *("ne", "neg", "or_", "pos", "pow", "sub", "truediv", "xor"),
)


def numpy_table() -> Iterator[tuple[str, Callable[..., Any]]]:
    listed = (*_ufuncs._unary, *_ufuncs._binary)  # noqa: SLF001 - torch's own lists
    ufuncs = (name for name in listed if hasattr(numpy, name) and is_reviewed(name))
    for name in (*ufuncs, *_OTHERWISE_NAMED, *_CONVERSIONS, *_FUNCTIONS):
        found = getattr(numpy, name)
        yield f"n:{name}", functools.partial(_run, found, _place_of_out(found))
    for name in _OPERATORS:
        yield f"n:operator.{name}", functools.partial(_operate, getattr(operator, name))


def _run(function: Callable[..., Any], place: int, *arguments: Any, **named: Any) -> Any:
    """`place` is where the function takes an output that is given."""
    if "out" in named or (place < len(arguments) and arguments[place] is not None):
        raise ValueError("an output that is given")
    return _as_tensor(function(*arguments, **named))


def _place_of_out(function: Callable[..., Any]) -> int:
    parameters = [*inspect.signature(function).parameters]
    return parameters.index("out") if "out" in parameters else len(parameters)


def _operate(function: Callable[..., Any], *arguments: Any) -> Any:
    return _as_tensor(function(*map(_as_array, arguments)))


def _as_array(value: Any) -> Any:
    return ndarray(value) if isinstance(value, torch.Tensor) else value


def _as_tensor(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value.tensor
    if isinstance(value, (tuple, list)):
        return type(value)(map(_as_tensor, value))
    return value
