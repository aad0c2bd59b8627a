"""The state of a thread that a graph depends on beside its inputs: gradients and autocast."""

import contextlib
from collections.abc import Iterator

import torch


class CallState:
    """What of a caller's thread a graph depends on: gradients and autocast."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cuda", "cpu")
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """That state in another thread."""
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
    """The state itself: a context would bring a cache with it."""
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
