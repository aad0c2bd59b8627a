"""Watches a gateway in a thread of its own: the state as it is now, or why it is not known."""

import json
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPResponse

from gpufaas.errors import CommandError
from gpufaas.gateway_remote import GatewayRemote
from gpufaas.top.state import State, changed

# The gateway says something about every second.
_SILENCE_S = 15.0
_PAUSE_S = 1.0


class Watching:
    """Reads events until the process ends; `told` is called, in the thread, at each of them."""

    def __init__(self, gateway: GatewayRemote, told: Callable[[], None]) -> None:
        self._gateway = gateway
        self._told = told
        self._state: State | None = None
        self._trouble = ""
        self._last_id = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watching", daemon=True)

    def start(self) -> None:
        """Begin; whoever is only waiting for an answer does not keep the process alive."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._ended.set()

    def seen(self) -> tuple[State | None, str]:
        """The last state, and what is wrong with it if something is."""
        with self._lock:
            return self._state, self._trouble

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                self._read()
                self._note(None, "the gateway ended the stream")
            except CommandError as error:
                self._note(None, str(error))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                self._last_id = ""  # what we have may be wrong by now: the whole state again
                self._note(None, f"an event cannot be read: {error!r}")
            self._ended.wait(_PAUSE_S)

    def _read(self) -> None:
        headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
        with self._gateway.reading("/ui/events", _SILENCE_S, **headers) as answer:
            for kind, data in events(answer, self._noted):
                if self._ended.is_set():
                    return
                told = json.loads(data)
                if not isinstance(told, dict):
                    raise TypeError(f"{kind} is no object")
                if kind == "state":
                    self._note(told, "")
                elif self._state is not None:
                    self._note(changed(self._state, told), "")

    def _noted(self, event_id: str) -> None:
        self._last_id = event_id

    def _note(self, state: State | None, trouble: str) -> None:
        with self._lock:
            self._state = state or self._state
            self._trouble = trouble
        self._told()


def events(answer: HTTPResponse, noted: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    """Server-sent events as they come: kind and data. `noted` is told each one's id after it."""
    kind, data, event_id = "", b"", ""
    while line := answer.readline():
        field, _, value = line.rstrip(b"\r\n").partition(b": ")
        if field == b"event":
            kind = value.decode()
        elif field == b"data":
            data = value
        elif field == b"id":
            event_id = value.decode()
        elif not field and data:
            yield kind, data
            noted(event_id)
            kind, data = "", b""
