"""Passes a call's lease from its headers to the shim, and the models used back."""

import importlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from gateway_ext.runtime.handler_event import HandlerData, Headers, ShimData

Pairs = list[tuple[str, str]]
SecondsLeft = Callable[[], float | None]

MODELS, LOCAL = "X-Gpu-Models", "X-Gpu-Local"
_WITHIN = "x-gpu-within"
_SECONDS = re.compile(r"[0-9]{1,18}(\.[0-9]*)?(e[-+]?[0-9]{1,3})?")


class NoPlacements:
    """For a function without a GPU: nothing is passed."""

    trailers: tuple[str, ...] = ()  # what a stream may be followed by

    def __init__(self) -> None:
        self.data = HandlerData()

    def awaited_s(self, headers: Headers) -> float:
        """The seconds for which the gateway waits for the answer, from the request's head on."""
        del headers
        return math.inf

    def given(self, headers: Headers, left_s: SecondsLeft) -> AbstractContextManager[None]:
        """A context for the call of the handler, which has this much time left."""
        del headers, left_s
        return nullcontext()

    def used(self) -> Pairs:
        """Headers for the gateway about the call's GPU work; called inside `given`."""
        return []

    def timing_entries(self) -> Sequence[str]:
        """Return the times of the call's GPU calls; called inside `given`."""
        return ()


class ShimPlacements(NoPlacements):
    """Uses the shim's own module, which needs no torch."""

    trailers = (MODELS, LOCAL)

    def __init__(self) -> None:
        super().__init__()
        self.data = ShimData()
        module = importlib.import_module("torch_shim.leases.request_context")
        self._given: Callable[..., AbstractContextManager[None]] = module.given
        self._used: Callable[[], Iterable[str]] = module.used
        self._told: Callable[[], Iterable[str]] = module.told
        self._timing_entries: Callable[[], Sequence[str]] = module.timing_entries
        module.expect_calls()

    def awaited_s(self, headers: Headers) -> float:
        """What the gateway says; inf where it says nothing that is a time."""
        text = headers.get(_WITHIN, "")
        return float(text) if _SECONDS.fullmatch(text) else math.inf

    def given(self, headers: Headers, left_s: SecondsLeft) -> AbstractContextManager[None]:
        address, lease = headers.get("x-gpu-address"), headers.get("x-gpu-lease")
        return self._given(address, lease, trace=headers.get("traceparent"), left_s=left_s)

    def used(self) -> Pairs:
        """The digests of the models, which the gateway learns, and what ran without a GPU."""
        headers = []
        if models := ",".join(self._used()):
            headers.append((MODELS, models))
        if local := "|".join(self._told()):
            headers.append((LOCAL, local))
        return headers

    def timing_entries(self) -> Sequence[str]:
        """Return the times in the format of X-Gpu-Trace."""
        return self._timing_entries()


def placements(*, gpu: bool) -> NoPlacements:
    return ShimPlacements() if gpu else NoPlacements()
