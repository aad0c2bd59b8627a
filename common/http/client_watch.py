"""Tells who serves a request that its client has left; a task that waits for it costs more."""

from collections.abc import Callable

from common.http.asgi import Scope

# Our server puts a ClientWatch here; with another server an application waits for its message.
_KEY = "gpufaas.client"


class ClientWatch:
    """The client of one request, as long as the request has no complete response."""

    __slots__ = ("_call", "_has_left")

    def __init__(self) -> None:
        self._call: Callable[[], None] | None = None
        self._has_left = False

    def start(self, call: Callable[[], None]) -> None:
        """Call this once the client has left; at once, if that was before."""
        if self._has_left:
            call()
        else:
            self._call = call

    def stop(self) -> None:
        """Call nothing any more."""
        self._call = None

    def left(self) -> None:
        """The client has left."""
        self._has_left = True
        call, self._call = self._call, None
        if call is not None:
            call()


def offer_watch(scope: Scope) -> None:
    """Let the application watch the client of a request that begins."""
    scope[_KEY] = ClientWatch()


def watch_in(scope: Scope) -> ClientWatch | None:
    """The watch of a request's client; None if the server offers none."""
    found = scope.get(_KEY)
    return found if isinstance(found, ClientWatch) else None
