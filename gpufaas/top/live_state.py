"""The state of the page, kept up to date by its events (docs/page.md), which a thread reads."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.client import HTTPResponse
from typing import Any

from common.numerals import name_sort_key
from gpufaas.errors import CommandError
from gpufaas.remote.gateway_api import GatewayApi

State = Mapping[str, Any]

_ID_FIELDS = {"gpus": "id", "functions": "id", "decisions": "request"}


def changed(state: State, content: Mapping[str, Any]) -> State:
    """The state after an event `change` or `ping`."""
    new = dict(state)
    for section, value in content.items():
        if section == "history":
            new["history"] = _longer(state["history"], value["added"])
        elif section in _ID_FIELDS:
            new[section] = _with_items(section, state[section], value)
        else:
            new[section] = value
    return new


def _longer(history: Mapping[str, Any], added: Mapping[str, list[Any]]) -> Mapping[str, Any]:
    points = history["points"]
    series = {
        kind: (values + added.get(kind, []))[-points:] for kind, values in history["series"].items()
    }
    return {**history, "series": series}


def _with_items(
    section: str, before: list[Mapping[str, Any]], content: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    name = _ID_FIELDS[section]
    items = {item[name]: item for item in before}
    for gone in content["removed"]:
        items.pop(gone, None)
    items.update((item[name], item) for item in content["replaced"])
    if section == "decisions":
        return sorted(items.values(), key=lambda item: -item["number"])
    return sorted(items.values(), key=lambda item: name_sort_key(item[name]))


# The gateway sends an event about every second.
_LONGEST_SILENCE_S = 15.0
_PAUSE_S = 1.0


class EventReader:
    """Reads events until the process ends; `notify` is called, in the thread, after each event."""

    def __init__(
        self, gateway: GatewayApi, notify: Callable[[], None], pause_s: float = _PAUSE_S
    ) -> None:
        self._gateway = gateway
        self._notify = notify
        self._pause_s = pause_s
        self._state: State | None = None
        self._trouble = ""
        self._last_id = ""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event-reader", daemon=True)

    def start(self) -> None:
        """Start the thread, which does not keep the process alive."""
        self._thread.start()

    def stop(self) -> None:
        """Open no further stream, and end the current one at its next event."""
        self._stopped.set()

    def latest(self) -> tuple[State | None, str]:
        """The last state, and why it may be out of date (or an empty text)."""
        with self._lock:
            return self._state, self._trouble

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._read_stream()
                self._set(None, "the gateway ended the stream")
            except CommandError as error:
                self._set(None, str(error))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                self._last_id = ""  # our state may be wrong: request the whole state again
                self._set(None, f"an event cannot be read: {error!r}")
            self._stopped.wait(self._pause_s)

    def _read_stream(self) -> None:
        headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
        with self._gateway.call(
            "GET", "/ui/events", headers=headers, longest_silence_s=_LONGEST_SILENCE_S
        ) as response:
            if response.status != HTTPStatus.OK:
                self._gateway.refuse(response.status, response.read())
            for kind, data, event_id in events(response):
                if self._stopped.is_set():
                    return
                content = json.loads(data)
                if not isinstance(content, dict):
                    raise TypeError(f"{kind} is no object")
                if kind == "state":
                    self._set(content, "")
                elif self._state is not None:
                    self._set(changed(self._state, content), "")
                self._last_id = event_id  # only now: what failed is requested again

    def _set(self, state: State | None, trouble: str) -> None:
        with self._lock:
            self._state = state or self._state
            self._trouble = trouble
        self._notify()


def events(response: HTTPResponse) -> Iterator[tuple[str, bytes, str]]:
    """Server-sent events: kind, data and id."""
    kind, data, event_id = "", b"", ""
    while line := response.readline():
        field, _, value = line.rstrip(b"\r\n").partition(b": ")
        if field == b"event":
            kind = value.decode()
        elif field == b"data":
            data = value
        elif field == b"id":
            event_id = value.decode()
        elif not field and data:
            yield kind, data, event_id
            kind, data = "", b""
