"""What a request's head must be beyond what the parser checks, and how a bad one is answered."""

from http import HTTPStatus
from typing import NamedTuple

from common.http.asgi import Header

_VERSIONS = frozenset({"1.0", "1.1"})
_MOST_DIGITS = 18  # of 2^59 bytes; Python reads no number of more than 4300 digits
_LATER = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


class Refusal(NamedTuple):
    """How a request is refused, after which its connection closes."""

    status: HTTPStatus
    why: str

    @property
    def response(self) -> bytes:
        text = f"{self.why}\n".encode()
        later = "retry-after: 1\r\n" if self.status in _LATER else ""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            "content-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(text)}\r\n{later}connection: close\r\n\r\n"
        )
        return head.encode() + text


class BadHead(Exception):
    """A request that is refused while its head is read."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.why)
        self.refusal = refusal


MALFORMED = Refusal(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
TOO_LARGE = Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the headers are too large")
TOO_MANY_REQUESTS = Refusal(HTTPStatus.TOO_MANY_REQUESTS, "too many requests at once")
NO_STREAM = Refusal(HTTPStatus.NOT_FOUND, "there is no such stream")
NO_ROOM = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server has as many connections as it takes")


def check_head(version: str, method: bytes, headers: list[Header]) -> None:
    """Raise BadHead for a request that two servers could read differently, or that none serves."""
    if version not in _VERSIONS:
        status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        raise _bad(status, f"HTTP/{version} is not spoken here, but HTTP/1.1")
    if method == b"CONNECT":
        raise _bad(HTTPStatus.NOT_IMPLEMENTED, "this is no proxy")
    hosts = 0
    codings: list[bytes] = []
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            _check_length(value)
        elif name == b"transfer-encoding":
            codings.append(value)
    if hosts > 1:
        raise _bad(HTTPStatus.BAD_REQUEST, "there is more than one Host")
    if codings:
        _check_codings(version, b", ".join(codings))


def _check_length(value: bytes) -> None:
    if len(value) > _MOST_DIGITS or not value.isdigit():
        raise _bad(HTTPStatus.BAD_REQUEST, "Content-Length is malformed")


def _check_codings(version: str, codings: bytes) -> None:
    if version == "1.0":  # an HTTP/1.0 server in front would have read no chunks
        raise _bad(HTTPStatus.BAD_REQUEST, "HTTP/1.0 has no Transfer-Encoding")
    if codings.lower() != b"chunked":
        shown = codings[:40].decode("latin-1")
        raise _bad(HTTPStatus.NOT_IMPLEMENTED, f"transfer encoding {shown} is not known here")


def _bad(status: HTTPStatus, why: str) -> BadHead:
    return BadHead(Refusal(status, why))
