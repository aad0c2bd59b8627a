"""The thread state that a graph depends on besides its inputs: gradient mode and autocast."""

import contextlib
from collections.abc import Iterator

import torch


class CallState:
    """The gradient mode and autocast settings of the thread that created this object."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cuda", "cpu")
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Apply the saved state to the current thread inside the `with` block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, enabled, dtype in self._autocast:
                was_enabled, was_dtype = (
                    torch.is_autocast_enabled(kind),
                    torch.get_autocast_dtype(kind),
                )
                stack.callback(_set_autocast, kind, was_dtype, enabled=was_enabled)
                _set_autocast(kind, dtype, enabled=enabled)
            yield


def _set_autocast(kind: str, dtype: torch.dtype, *, enabled: bool) -> None:
    """Set autocast directly: `torch.autocast` would also create a cache."""
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
