"""How the checks of arguments refuse."""

import torch


def require(holds: object, what: str, *values: object) -> None:
    """Raise ValueError with this text, which has room for the values, unless it holds."""
    if not holds:
        raise ValueError(what.format(*values))


def require_values(hold: torch.Tensor, what: str) -> None:
    """Have the device assert it: on a GPU that costs no wait, and ends the worker."""
    torch._assert_async(hold.all(), what)  # noqa: SLF001 - torch has no public one


def require_within(indices: torch.Tensor, size: int, what: str) -> None:
    """Every index is one of so many things."""
    if indices.numel():
        require_values((indices >= 0) & (indices < size), what)
