"""Where a request's GPU is: what a function's caller was given for it, for as long as it is served.

A function's runtime says around every request

    address, lease = headers.get("X-Gpu-Address"), headers.get("X-Gpu-Lease")
    with placement.given(address, lease, trace=headers.get("traceparent")):
        handle(request)
        answer.headers["X-Gpu-Models"] = ",".join(placement.used())

and the calls in it, in asyncio tasks, and in threads that were started with a copy of its context
(`asyncio.to_thread` is) use that lease. Other threads, and requests without, ask by themselves.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from torch_shim.wire.call_timings import CallTiming, Timings

# Nobody expects more of a request, and the names of all have to fit into a header.
_MOST_MODELS = 64
_UNTIMED: AbstractContextManager[None] = nullcontext()


class RequestLease:
    """One request: its lease's token, if any, and where its caller says that the lease is.

    `addresses` are a hint that nobody goes by: a GPU manager says where the lease is.
    """

    def __init__(self, addresses: tuple[str, ...], token: str, trace: str = "") -> None:
        self.addresses = addresses
        self.timings = Timings(trace) if trace else None
        self.token = token
        self.node = node_of(token)
        self.over = False  # the request has been answered: whoever still runs asks by itself
        self.models: dict[str, None] = {}  # whose graphs it called, the first one first
        self._at_end: list[Callable[[], None]] = []

    def at_end(self, do: Callable[[], None]) -> None:
        """Have this done once the request has been answered."""
        self._at_end.append(do)

    def ends(self) -> None:
        """It has been answered."""
        self.over = True
        for do in self._at_end:
            do()


_current: ContextVar[RequestLease | None] = ContextVar("gpufaas_placement", default=None)


@contextmanager
def given(
    addresses: str | Iterable[str] | None, token: str | None, *, trace: str | None = None
) -> Iterator[None]:
    """The calls inside use the lease of this token; without one they ask by themselves.

    Addresses are separated by commas where they come in one text. `trace` is the request's
    `traceparent`: where there is one, `told` says what the calls took.
    """
    if isinstance(addresses, str):
        addresses = addresses.split(",")
    found = tuple(address.strip() for address in addresses or () if address.strip())
    request = RequestLease(found, token if token and found else "", trace or "")
    before = _current.set(request)
    try:
        yield
    finally:
        request.ends()
        _current.reset(before)


def current() -> RequestLease | None:
    """The placement of the request that this code serves, unless there is none."""
    found = _current.get()
    return None if found is None or found.over or not found.token else found


def served() -> bool:
    """Whether this code began with a request that had a lease, which may be over by now."""
    found = _current.get()
    return found is not None and bool(found.token)


def used() -> list[str]:
    """The digests of the models whose graphs this request has called, in order of first use."""
    found = _current.get()
    return [] if found is None else list(found.models)


def told() -> list[str]:
    """What the graph calls of this request took, as the header X-Gpu-Trace has it."""
    found = _current.get()
    return [] if found is None or found.timings is None else found.timings.told()


def timed() -> AbstractContextManager[CallTiming | None]:
    """A graph call of the request that this code serves, if any, is made in here."""
    found = _current.get()
    if found is None or found.over or found.timings is None:
        return _UNTIMED
    return found.timings.call()


@contextmanager
def timed_here(reason: str) -> Iterator[None]:
    """The function's own processor does in here what a worker could not, for this reason."""
    with timed() as timing:
        if timing is not None:
            timing.ran_locally(reason)
        yield


def note(digest: str) -> None:
    """The request that this code serves, if any, calls a graph of this model."""
    found = _current.get()
    if found is not None and not found.over and len(found.models) < _MOST_MODELS:
        found.models.setdefault(digest)


def node_of(token: str) -> str | None:
    """The node that a token is for, by its own word: a GPU manager knows whether it is true."""
    body, _, _ = token.rpartition(".")
    try:
        node = json.loads(base64.urlsafe_b64decode(body + "=="))["node"]
    except (ValueError, LookupError, TypeError):
        return None
    return node if isinstance(node, str) else None
