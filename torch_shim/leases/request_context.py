"""The lease, models and call timings of the request that the current code serves.

A function's runtime wraps every request:

    address, lease = headers.get("X-Gpu-Address"), headers.get("X-Gpu-Lease")
    with request_context.given(address, lease, trace=headers.get("traceparent")):
        handle(request)
        answer.headers["X-Gpu-Models"] = ",".join(request_context.used())
        answer.headers["X-Gpu-Local"] = "|".join(request_context.told())

GPU calls inside the block use that lease: those in its thread, in asyncio tasks, and in threads
that were started with a copy of the context (as `asyncio.to_thread` does). Calls in other threads,
and calls of requests without a lease, acquire their own. A runtime imports this module in every
function that may use a GPU: like the runtime it needs the standard library alone.
"""

import base64
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from typing import NamedTuple

from torch_shim.advice import told_places
from torch_shim.process_report import report
from torch_shim.wire import current_call
from torch_shim.wire.current_call import UNTIMED, CallTiming, SecondsLeft, Timings

# The models of a request that are reported: all their digests have to fit into one header.
_MOST_MODELS = 64
_MOST_LEASES = 1 << 62
# A function's gateway tells it the caller of the function, too, and no other line.
_TRACING = (
    "tracing: this call ran on the processor while its graph was traced; later calls with such"
    " inputs use the GPU (docs/functions.md#first-calls)"
)
# A function has about one lease at a time from each gateway, for many requests.
_MOST_TOKENS = 64


class TokenClaims(NamedTuple):
    """What a token says of its lease; nothing, if it is no token.

    A lease that `stands` is for several requests. Number and GPU of a lease are given if its node
    lets calls in without being shown the token. Several requests may share one, each with a token
    of its own: whoever gives it back names the `request`.
    """

    node: str | None = None
    stands: bool = False
    lease: int = 0
    gpu: str = ""
    request: str | None = None


@functools.lru_cache(maxsize=_MOST_TOKENS)
def claims_of(token: str) -> TokenClaims:
    """The token's signature is not verified here."""
    body, _, _ = token.rpartition(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(body + "=="))
        node, lease, gpu = claims["node"], claims.get("lease"), claims.get("gpu")
        stands, request = claims.get("stands", False), claims.get("request")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return TokenClaims()
    known = type(lease) is int and 0 < lease < _MOST_LEASES and isinstance(gpu, str)
    if not known or claims.get("ahead") is not True:
        lease, gpu = 0, ""
    node, request = (each if isinstance(each, str) else None for each in (node, request))
    return TokenClaims(node, stands is True, lease, gpu, request)


class RequestLease:
    """One request, with its lease's token, if any; the current one inside a `with` block, once."""

    _before: "tuple[Token[RequestLease], Token[SecondsLeft | None]]"

    def __init__(self, token: str, trace: str = "", left_s: SecondsLeft | None = None) -> None:
        self._left_s = left_s
        self.timings = Timings(trace)
        self.token = token
        self.claims = claims_of(token)
        self.over = False  # True once the request is answered: later calls acquire their own lease
        self.traces = False  # True once a module ran in the function while its graph was traced
        self.answered = False  # True once a GPU has answered a call
        self.models: dict[str, None] = {}  # the models called, in order of first use
        self._at_end: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._before = _current.set(self), current_call.DEADLINE.set(self._seconds_left)

    def __exit__(self, *_: object) -> None:
        self.over = True
        for do in self._at_end:
            do()
        request, deadline = self._before
        current_call.DEADLINE.reset(deadline)
        _current.reset(request)

    def at_end(self, do: Callable[[], None]) -> None:
        self._at_end.append(do)

    def _seconds_left(self) -> float | None:
        """The seconds until nobody waits for the answer; None without a limit, or after it."""
        return None if self.over or self._left_s is None else self._left_s()


_NOBODY = RequestLease("")
_NOBODY.over = True
_current: ContextVar[RequestLease] = ContextVar("gpufaas_placement", default=_NOBODY)


def given(
    addresses: str | Iterable[str] | None,
    token: str | None,
    *,
    trace: str | None = None,
    left_s: SecondsLeft | None = None,
) -> RequestLease:
    """Make GPU calls inside the `with` block use the lease of this token, if there is one.

    A lease has addresses, too, several in one string between commas. None is dialed: a GPU manager
    names the node of the lease and its addresses. `trace` is the request's `traceparent`: if
    it is given, `timing_entries` reports the times of the request's GPU calls. A lease that the
    block acquires itself is waited for as long as the request has left then (`left_s`).
    """
    if isinstance(addresses, str):
        addresses = addresses.split(",")
    has_address = any(map(str.strip, addresses or ()))
    return RequestLease(token if token and has_address else "", trace or "", left_s)


def current() -> RequestLease | None:
    """Return the current request with its lease; None without a lease or after the request."""
    request = _current.get()
    return None if request.over or not request.token else request


def served() -> bool:
    """Whether this code was started by a request with a lease; the request may have ended."""
    return bool(_current.get().token)


def used() -> list[str]:
    """Return the digests of the models that this request has called, in order of first use."""
    return list(_current.get().models)


def expect_calls() -> None:
    """This process serves a function's calls."""
    report.expect_calls()


def told() -> list[str]:
    """Return lines about work that stays in the function, for the header X-Gpu-Local."""
    report.note_answer()
    tracing = [_TRACING] if _current.get().traces else []
    return tracing + told_places.to_send()


def timing_entries() -> list[str]:
    """Return the times of this request's GPU calls, as entries of the header X-Gpu-Trace."""
    return _current.get().timings.entries()


def timed() -> AbstractContextManager[CallTiming | None]:
    """Time the GPU call made inside the `with` block, if the current request has a trace."""
    request = _current.get()
    return UNTIMED if request.over else request.timings.call()


@contextmanager
def timed_locally(reason: str) -> Iterator[None]:
    """Time work inside the `with` block that runs on the function's own processor, and why."""
    with timed() as timing:
        if timing is not None:
            timing.ran_locally(reason)
        yield


def note_tracing() -> None:
    request = _current.get()
    if not request.over:
        request.traces = True


def note_model(digest: str) -> None:
    request = _current.get()
    if not request.over and len(request.models) < _MOST_MODELS:
        request.models.setdefault(digest)


def note_answer() -> None:
    request = _current.get()
    if not request.over:
        request.answered = True


def goes_on() -> bool:
    """Whether the current request has had an answer of a GPU: its work would be lost."""
    request = _current.get()
    return request.answered and not request.over
