"""A program run once for several calls, by torch's vmap over the inputs that differ.

Every operator brings its own rule for a batch, so what a program says about sizes stays true.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from gpu_manager.worker.merging.records import (
    CannotMerge,
    Layout,
)
from gpu_manager.worker.orders import Singly
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.inputs import Inputs
from gpu_manager.worker.program.recorded_runs import ProgramRun
from gpu_manager.worker.program.tensor_specs import identity
from torch_shim.wire.shared_memory import is_dense

# dtype -> (relative, absolute): by how much a call may differ when it runs with others. Whatever
# is not here must be equal. These are the tolerances of docs/compatibility.md.
TOLERANCES = {
    torch.float64: (1e-7, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.complex64: (1e-4, 1e-5),
    torch.complex128: (1e-7, 1e-9),
}
# What torch says where an operator has no rule for a batch and is called once for each call.
_LOOPS = "batching rule"
_SAYS_LOOPS = f".*{_LOOPS}"
# What it says where something is written, for each call, to what all calls have.
_OF_WRITES = ("out-of-place operators", "in-place", "doesn't match the broadcast shape")
_TENSOR = object()  # stands where an output is a tensor


def layouts_of(outputs: Sequence[Any]) -> list[Any]:
    """The outputs without their numbers: what those of a merged run must be like."""
    return [_layout(output) if isinstance(output, torch.Tensor) else output for output in outputs]


def inputs_in_outputs(
    inputs: Inputs, run: ProgramRun, constants: Sequence[torch.Tensor]
) -> set[int] | None:
    """The sent inputs that outputs lie in; None where one lies in anything else that is not new."""
    sent, *others = inputs.positions
    by_storage = {**sent, **run.positions}
    images = {entry.position for entry in inputs.sent if entry.held.image is not None}
    seen = {storage for found in others for storage in found}
    seen |= {identity(constant.untyped_storage()) for constant in constants}
    found: set[int] = set()
    for output in run.outputs:
        if isinstance(output, torch.Tensor):
            storage = identity(output.untyped_storage())
            position = by_storage.get(storage)
            if storage in seen or position in images:
                return None
            if position is None:
                seen.add(storage)
            else:
                found.add(position)
    return found


def run_merged(
    program: BuiltProgram, calls: Sequence[Inputs], layouts: Sequence[Any]
) -> list[tuple[Any, ...]]:
    """The outputs of each call, each in memory of its own or in a part that no other call has."""
    first = calls[0]
    positions = [entry.position for entry in first.sent if entry.held.image is None]
    together = [torch.stack([each.values[place] for each in calls]) for place in positions]
    plain: list[Any] = []

    def one(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(first.values)
        for place, tensor in zip(positions, tensors, strict=True):
            values[place] = tensor
        outputs = program.run(values, program.constants)
        plain[:] = [_TENSOR if isinstance(each, torch.Tensor) else each for each in outputs]
        return tuple(each for each in outputs if isinstance(each, torch.Tensor))

    found = torch.func.vmap(one, randomness="error")(*together)
    del together
    return _apart(list(found), plain, layouts, len(calls))


class LoopsHeard(threading.local):
    """Whether an operator ran once for each call in this thread, by what torch said there."""

    any = False


# The rules for a batch that torch lacks for its attention: one more batch is the same.
#
# Without them vmap calls such a kernel once for each call, and it is most of what transformers
# compute.

_functorch = torch._C._functorch  # noqa: SLF001 - what torch's own rules in Python call
_Batch = tuple[torch.Tensor, int | None]


@functools.cache
def attention_rules() -> torch.library.Library:
    """Make the rules known to torch, once in a process; they hold as long as the result lives."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call] # as torch has it
    for name, rule in _RULES.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, rule, "FuncTorchBatched")  # type: ignore[no-untyped-call] # the same
    return library


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if dropout_p > 0:
        raise RuntimeError("vmap: randomness of attention with dropout")
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    batches = [_functorch._unwrap_batched(each, level) for each in (query, key, value)]  # noqa: SLF001 - as above
    mask: Any = (None, None)
    if attn_mask is not None:
        mask = _functorch._unwrap_batched(attn_mask, level)  # noqa: SLF001 - as above
    (size,) = {found.size(place) for found, place in (*batches, mask) if place is not None}
    with interpreter.lower():
        folded = [_folded(found, place, size) for found, place in batches]
        sizes = folded[0].shape[0] // size
        both = None if mask[0] is None else _mask(mask, size, sizes)
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - as it is called
        found = attention(*folded, dropout_p, is_causal, attn_mask=both, scale=scale)
        parts = [each.unflatten(0, (size, sizes)) for each in found]
    first, second = (_functorch._add_batch_dim(each, 0, level) for each in parts)  # noqa: SLF001 - as above
    return first, second


def _folded(tensor: torch.Tensor, place: int | None, size: int) -> torch.Tensor:
    return _whole(tensor, place, size).flatten(0, 1)


def _whole(tensor: torch.Tensor, place: int | None, size: int) -> torch.Tensor:
    return tensor.expand(size, *tensor.shape) if place is None else tensor.movedim(place, 0)


def _mask(batch: _Batch, size: int, sizes: int) -> torch.Tensor:
    """A mask for each of the calls' batches: of two dimensions for all, or of four."""
    whole = _whole(*batch, size)
    if whole.dim() == 3:  # noqa: PLR2004 - rows and columns of each call
        whole = whole[:, None, None]
    return whole.expand(size, sizes, *whole.shape[2:]).flatten(0, 1)


def _heads(*arguments: Any) -> tuple[Any, Any]:
    """Attention with its weights, which all calls share."""
    out, weights = _over_sequences(torch.ops.aten._native_multi_head_attention, 3, 9, arguments)  # noqa: SLF001 - as it is called
    return out, weights


def _layer(*arguments: Any) -> Any:
    (out,) = _over_sequences(torch.ops.aten._transformer_encoder_layer_fwd, 1, 18, arguments)  # noqa: SLF001 - as above
    return out


def _over_sequences(
    operator: Any, sequences: int, mask: int, arguments: tuple[Any, ...]
) -> list[Any]:
    """An operator whose first arguments are sequences, with weights that all calls share.

    Without a mask, whose shape the kernel would believe.
    """
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    first, rest = arguments[:sequences], arguments[sequences:]
    tensors = [each for each in rest if isinstance(each, torch.Tensor)]
    has_mask = len(arguments) > mask and arguments[mask] is not None
    if has_mask or any(_functorch._unwrap_batched(each, level)[1] is not None for each in tensors):  # noqa: SLF001 - as above
        raise RuntimeError(f"Batching rule not implemented for {operator} with such arguments")
    batches = {id(each): _functorch._unwrap_batched(each, level) for each in first}  # noqa: SLF001 - as above
    size, *_ = (found.size(place) for found, place in batches.values() if place is not None)
    with interpreter.lower():
        # What is one tensor stays one: kernels look at that.
        folded = {number: _folded(*batch, size) for number, batch in batches.items()}
        found = operator(*(folded[id(each)] for each in first), *rest)
        results = found if isinstance(found, tuple) else (found,)
        parts = [None if each is None else each.unflatten(0, (size, -1)) for each in results]
    return [
        None if each is None else _functorch._add_batch_dim(each, 0, level)  # noqa: SLF001 - as above
        for each in parts
    ]


_RULES = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_native_multi_head_attention": _heads,
    "_transformer_encoder_layer_fwd": _layer,
}


loops_heard = LoopsHeard()


def hear_loops() -> None:
    """Have `loops_heard` of this thread follow what torch says, from now on.

    A filter for one run would be a filter for all threads. Where another thread enters or leaves
    `warnings.catch_warnings` later, that hides what torch says, until this is called again.
    """
    loops_heard.any = False
    first = [getattr(known[1], "pattern", "") for known in warnings.filters[:1]]
    if first != [_SAYS_LOOPS]:
        warnings.filterwarnings("always", _SAYS_LOOPS)
    show = warnings.showwarning
    if getattr(show, "func", None) is not _hear:
        warnings.showwarning = functools.partial(_hear, show)


def writes_to_shared(error: Exception) -> bool:
    """Whether a run failed since it writes to what all calls have, by what torch says."""
    text = str(error)
    return any(words in text for words in _OF_WRITES)


def differs(single: Sequence[Any], merged: Sequence[Any]) -> bool:
    """Whether a call gave something else alone than with others, beyond what is promised."""
    return not all(map(_is_close, single, merged))


def _hear(show: Callable[..., None], message: Warning | str, *where: Any, **more: Any) -> None:
    if _LOOPS in str(message):
        loops_heard.any = True
    else:
        show(message, *where, **more)


def _layout(output: torch.Tensor) -> Layout:
    is_plain = output.numel() > 0 and is_dense(output.shape, output.stride())
    strides = tuple(output.stride()) if is_plain else None
    return Layout(output.dtype, tuple(output.shape), strides)


def _apart(
    found: list[torch.Tensor], plain: list[Any], layouts: Sequence[Any], calls: int
) -> list[tuple[Any, ...]]:
    if len(plain) != len(layouts):
        raise CannotMerge(Singly.DIFFERS)
    tensors = iter(found)
    by_output: list[Sequence[Any]] = []
    for value, layout in zip(plain, layouts, strict=True):
        if value is _TENSOR and isinstance(layout, Layout):
            by_output.append(_pieces(next(tensors), layout))
        elif type(value) is not type(layout) or repr(value) != repr(layout):
            raise CannotMerge(Singly.DIFFERS)
        else:
            by_output.append([value] * calls)
    return list(zip(*by_output, strict=True)) if by_output else [()] * calls


def _pieces(whole: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    if whole.dtype != layout.dtype or tuple(whole.shape[1:]) != layout.shape:
        raise CannotMerge(Singly.DIFFERS)
    whole = whole.detach().resolve_conj().resolve_neg()
    pieces: Sequence[torch.Tensor] = whole.unbind(0)
    if layout.strides is None:
        return [as_laid_out(piece, None) for piece in pieces]
    owned = whole.stride(0) >= max(pieces[0].numel(), 1)
    return [
        piece if owned and piece.stride() == layout.strides else as_laid_out(piece, layout.strides)
        for piece in pieces
    ]


def as_laid_out(piece: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """A copy with these strides; contiguous for none."""
    if strides is None:
        return piece.clone(memory_format=torch.contiguous_format)
    made = torch.empty_strided(piece.shape, strides, dtype=piece.dtype, device=piece.device)
    return made.copy_(piece)


def _is_close(single: Any, merged: Any) -> bool:
    if not isinstance(single, torch.Tensor):
        return type(single) is type(merged) and repr(single) == repr(merged)
    if single.shape != merged.shape or single.dtype != merged.dtype:
        return False
    if single.dtype not in TOLERANCES:
        return torch.equal(single, merged)
    relative, absolute = TOLERANCES[single.dtype]
    return torch.allclose(merged, single, relative, absolute, equal_nan=True)
