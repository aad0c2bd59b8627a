"""What joins a call to its GPU: the lease from the headers to the shim, the models used back."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from gateway_ext.runtime.event import Headers

Pairs = list[tuple[str, str]]


class NoPlacements:
    """A function without a GPU: nothing to hand over."""

    def given(self, headers: Headers) -> AbstractContextManager[None]:
        """The handler's call belongs in here."""
        del headers
        return nullcontext()

    def used(self) -> Pairs:
        """Headers that say which models the call has used; asked inside `given`."""
        return []

    def told(self) -> Sequence[str]:
        """What the call's graph calls took; asked inside `given`."""
        return ()


class ShimPlacements(NoPlacements):
    """The shim's own module, which needs no torch."""

    def __init__(self) -> None:
        module = importlib.import_module("torch_shim.placement")
        self._given: Callable[..., AbstractContextManager[None]] = module.given
        self._used: Callable[[], Iterable[str]] = getattr(module, "used", tuple)
        # A shim of before takes no trace, and tells nothing.
        self._told: Callable[[], Sequence[str]] | None = getattr(module, "told", None)

    def given(self, headers: Headers) -> AbstractContextManager[None]:
        """Inside, the shim uses the lease that the gateway sent along, if any."""
        address, lease = headers.get("x-gpu-address"), headers.get("x-gpu-lease")
        if self._told is None:
            return self._given(address, lease)
        return self._given(address, lease, trace=headers.get("traceparent"))

    def used(self) -> Pairs:
        """The digests of the models, for the gateway to remember."""
        digests = list(self._used())
        return [("X-Gpu-Models", ",".join(digests))] if digests else []

    def told(self) -> Sequence[str]:
        """Times, as X-Gpu-Trace has them."""
        return () if self._told is None else self._told()


def placements(*, gpu: bool) -> NoPlacements:
    """The shim's, for a GPU function."""
    return ShimPlacements() if gpu else NoPlacements()
