"""What joins a call to its GPU: the lease from the headers to the shim, the models used back."""

import importlib
from collections.abc import Callable, Iterable
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


class ShimPlacements(NoPlacements):
    """The shim's own module, which needs no torch."""

    def __init__(self) -> None:
        module = importlib.import_module("torch_shim.placement")
        self._given: Callable[[str | None, str | None], AbstractContextManager[None]] = module.given
        self._used: Callable[[], Iterable[str]] = getattr(module, "used", tuple)

    def given(self, headers: Headers) -> AbstractContextManager[None]:
        """Inside, the shim uses the lease that the gateway sent along, if any."""
        return self._given(headers.get("x-gpu-address"), headers.get("x-gpu-lease"))

    def used(self) -> Pairs:
        """The digests of the models, for the gateway to remember."""
        digests = list(self._used())
        return [("X-Gpu-Models", ",".join(digests))] if digests else []


def placements(*, gpu: bool) -> NoPlacements:
    """The shim's, for a GPU function."""
    return ShimPlacements() if gpu else NoPlacements()
