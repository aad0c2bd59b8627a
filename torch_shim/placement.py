"""Where a request's GPU is: what a function's caller was given for it, for as long as it is served.

A function's runtime says around every request

    with placement.given(headers.get("X-Gpu-Address"), headers.get("X-Gpu-Lease")):
        handle(request)

and the calls in it, in asyncio tasks, and in threads that were started with a copy of its context
(`asyncio.to_thread` is) use that lease. Other threads, and requests without, ask by themselves.
"""

import base64
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Given:
    """One request's lease: its token, and where the GPU manager is that knows it."""

    def __init__(self, addresses: tuple[str, ...], token: str) -> None:
        self.addresses = addresses
        self.token = token
        self.node = node_of(token)
        self.over = False  # the request has been answered: whoever still runs asks by itself


_current: ContextVar[Given | None] = ContextVar("gpufaas_placement", default=None)


@contextmanager
def given(addresses: str | Iterable[str] | None, token: str | None) -> Iterator[None]:
    """The calls inside use the lease of this token; without one they ask by themselves.

    Addresses are separated by commas where they come in one text.
    """
    if isinstance(addresses, str):
        addresses = addresses.split(",")
    found = tuple(address.strip() for address in addresses or () if address.strip())
    request = Given(found, token) if token and found else None
    before = _current.set(request)
    try:
        yield
    finally:
        if request is not None:
            request.over = True
        _current.reset(before)


def current() -> Given | None:
    """The placement of the request that this code serves, unless there is none."""
    found = _current.get()
    return None if found is None or found.over else found


def served() -> bool:
    """Whether this code began with a request that had a lease, which may be over by now."""
    return _current.get() is not None


def node_of(token: str) -> str | None:
    """The node that a token is for, by its own word: a GPU manager knows whether it is true."""
    body, _, _ = token.rpartition(".")
    try:
        node = json.loads(base64.urlsafe_b64decode(body + "=="))["node"]
    except (ValueError, LookupError, TypeError):
        return None
    return node if isinstance(node, str) else None
