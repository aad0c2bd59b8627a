"""One connection to a browser's DevTools: commands, their answers, and the browser's events."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

PATIENCE_S = 20.0
_LARGEST_MESSAGE_BYTES = 64 << 20  # a screenshot in base64
# An interface of the machine came or went, and the browser broke off what it was fetching.
NETWORK_CHANGED = "ERR_NETWORK_CHANGED"


class BrowserError(Exception):
    """The browser, or the page in it, did not do what was asked."""


@dataclass(slots=True)
class Trouble:
    """What a page should not have: errors on its console, requests that failed."""

    console: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class DevToolsSession:
    """One DevTools connection: commands, and the events that come between their answers."""

    def __init__(self, url: str) -> None:
        # Nobody reads while a test does something else: no pings, no end to be waited for.
        connecting = connect(
            url,
            max_size=_LARGEST_MESSAGE_BYTES,
            max_queue=None,
            compression=None,
            proxy=None,
            ping_interval=None,
            close_timeout=1,
        )
        self._closing = contextlib.ExitStack()
        self._socket: ClientConnection = self._closing.enter_context(connecting)
        self._count = 0
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._urls: dict[str, str] = {}
        self._shown: set[str] = set()
        self.credentials: tuple[str, str] | None = None
        self.trouble = Trouble()
        self.loaded = False
        self.broken_off = False
        self.status = 0

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        number = self._send(method, parameters)
        self.until(lambda: number in self._answers, method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def until(self, found: Callable[[], bool], what: str) -> None:
        """Read messages until it is so."""
        end_s = time.monotonic() + PATIENCE_S
        while not found():
            if not self._read(end_s - time.monotonic()):
                raise BrowserError(f"not after {PATIENCE_S:g} s: {what}")

    def catch_up(self) -> None:
        """Read what has come."""
        while self._read(0.001):
            pass

    def close(self) -> None:
        self._closing.close()

    def _send(self, method: str, parameters: Mapping[str, Any]) -> int:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        try:
            self._socket.send(json.dumps(message))
        except ConnectionClosed as error:
            raise BrowserError(f"the connection to the browser is lost: {method}") from error
        return self._count

    def _read(self, patience_s: float) -> bool:
        """One message; whether any came."""
        try:
            message = json.loads(self._socket.recv(max(patience_s, 0.0)))
        except TimeoutError:
            return False
        except ConnectionClosed as error:
            raise BrowserError("the connection to the browser is lost") from error
        if "id" in message:
            self._answers[message["id"]] = message
        else:
            self._happened(message["method"], message["params"])
        return True

    def _happened(self, method: str, message: Mapping[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self.loaded = True
            case "Runtime.exceptionThrown":
                self.trouble.console.append(thrown(message["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if message["type"] in {"error", "warning", "assert"}:
                self.trouble.console.append(" ".join(str(arg) for arg in message["args"]))
            case "Log.entryAdded" if message["entry"]["level"] in {"error", "warning"}:
                entry = message["entry"]
                self._note(self.trouble.console, f"{entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                self._urls[message["requestId"]] = message["request"]["url"]
            case "Network.responseReceived":
                self._answered(message)
            case "Network.loadingFailed" if not message.get("canceled"):
                url = self._urls.get(message["requestId"], "?")
                self._note(self.trouble.failed, f"{url}: {message['errorText']}")
            case "Fetch.requestPaused":
                self._send("Fetch.continueRequest", {"requestId": message["requestId"]})
            case "Fetch.authRequired":
                self._log_in(message["requestId"])
            case _:
                pass  # an event that no test needs

    def _note(self, troubles: list[str], text: str) -> None:
        """Record trouble of the page; trouble of the network sets `broken_off` instead."""
        if NETWORK_CHANGED in text:
            self.broken_off = True
        else:
            troubles.append(text)

    def _answered(self, message: Mapping[str, Any]) -> None:
        response = message["response"]
        if message["type"] == "Document":
            self.status = response["status"]
        if response["status"] >= HTTPStatus.BAD_REQUEST:
            self.trouble.failed.append(f"{response['url']}: {response['status']}")

    def _log_in(self, request: str) -> None:
        """Send credentials once a request: the browser asks for wrong ones without end."""
        answer: dict[str, str] = {"response": "CancelAuth"}
        if self.credentials is not None and request not in self._shown:
            self._shown.add(request)
            user, password = self.credentials
            answer = {"response": "ProvideCredentials", "username": user, "password": password}
        message = {"requestId": request, "authChallengeResponse": answer}
        self._send("Fetch.continueWithAuth", message)


def thrown(details: Mapping[str, Any]) -> str:
    """What was thrown in the page, in words."""
    return str(details.get("exception", {}).get("description", details["text"]))
