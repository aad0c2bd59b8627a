"""One HTTP request to a server elsewhere; a login in its URL is kept out of what messages show."""

import http.client
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes, urlsplit

from gpufaas.errors import CommandError

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PORTS = {"http": 80, "https": 443}
# Text that may be a user and a password, in a URL that cannot be taken apart.
_POSSIBLE_LOGIN = re.compile(r"^([a-zA-Z]+://)?.*@", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HttpUrl:
    """A valid http:// or https:// URL; `str` gives it without its login."""

    scheme: str
    host: str
    port: int
    netloc: str
    path: str
    query: str
    login: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path}{f'?{self.query}' if self.query else ''}"

    @property
    def secure(self) -> bool:
        return self.scheme == "https"

    @property
    def authorization(self) -> str:
        """The URL's percent-encoded login as the header `Authorization`; empty without one."""
        user, _, password = self.login.partition(":")
        login = unquote_to_bytes(user) + b":" + unquote_to_bytes(password)
        return "Basic " + b64encode(login).decode() if self.login else ""


def http_url(text: str, whose: str) -> HttpUrl:
    """The parts of a URL; CommandError, which does not contain the login, if it is no valid one."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:  # a port that is no number; the error's text contains the URL
        raise _refused(text, whose) from error
    if parts.scheme not in _PORTS or not parts.hostname or port == 0 or not text.isascii():
        raise _refused(text, whose)
    login, _, netloc = parts.netloc.rpartition("@")
    return HttpUrl(
        parts.scheme,
        parts.hostname,
        port or _PORTS[parts.scheme],
        netloc,
        parts.path,
        parts.query,
        login,
    )


def is_at(url: HttpUrl, known: str | None) -> bool:
    """Whether a server whose URL is known, or not known, may be at this URL too."""
    if known is None:
        return True
    other = http_url(known, "server")
    hosts = {url.host, other.host}
    return url.port == other.port and (len(hosts) == 1 or hosts <= _LOOPBACK)


def _refused(text: str, whose: str) -> CommandError:
    shown = _POSSIBLE_LOGIN.sub(r"\1...@", text)
    return CommandError(f"{whose}: {shown!r} is no http:// or https:// URL")


# Requests that take longer are given up.
TIMEOUT_S = 10.0


class NoAnswer(CommandError):
    """The server did not answer, or broke off its answer; another server may answer.

    `received`: it may have read the request, and may do what it says.
    """

    def __init__(self, why: str, *, received: bool = False) -> None:
        self.received = received
        super().__init__(why)


@contextmanager
def open_response(
    server: HttpUrl,
    what: str,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[http.client.HTTPResponse]:
    """The response, to be read within the context; NoAnswer as soon as the connection fails.

    `what` names the server in the error; `timeout_s` is the longest silence.
    """
    kind = http.client.HTTPSConnection if server.secure else http.client.HTTPConnection
    connection = kind(server.netloc, timeout=timeout_s)
    received = False
    try:
        connection.connect()
        received = True
        connection.request(method, server.path.rstrip("/") + path, body, dict(headers or {}))
        yield connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        why = f"no {what} answers at {server}: {error}"
        raise NoAnswer(why, received=received) from error
    finally:
        connection.close()
