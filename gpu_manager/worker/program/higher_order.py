"""Operators that call parts of a program: loops, branches, scans, attention with own scores.

They compute what torch's own of these names compute without gradients, over functions that were
made of the program's reviewed steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch._higher_order_ops.flex_attention import flex_attention

Part = Callable[..., Any]

# A loop without end would keep the GPU; one beyond this bound runs on the function's processor.
_MOST_TURNS = 1 << 20


def table() -> dict[str, Callable[..., Any]]:
    """The operators by their names in programs."""
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
