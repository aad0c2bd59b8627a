"""An incremental HTTP/1.1 request parser. Pure, and strict against request smuggling."""

import re
from dataclasses import dataclass

from gateway_ext.runtime.handler_event import Headers

MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256
_MAX_LINE_BYTES = 4 << 10  # of a chunk's size, or of a trailer
_REQUEST = re.compile(r"([A-Z]+) ([!-~]+) HTTP/([0-9]\.[0-9])")
_VERSIONS = ("1.0", "1.1")
_HEADER = re.compile(r"^([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\n\0]*)\r\n", re.MULTILINE)
_HEX = re.compile(rb"[0-9A-Fa-f]{1,15}")


class Malformed(Exception):
    """A request that cannot be served; `status` is the answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(slots=True)
class RequestHead:
    """A request without its body; `length` is None where the body comes in chunks."""

    method: str
    target: str
    headers: Headers
    length: int | None
    keep_alive: bool
    chunks_allowed: bool
    expects_continue: bool


def head_in(buffer: bytearray) -> RequestHead | None:
    """Take a request head off the buffer, once it is complete."""
    while buffer.startswith(b"\r\n"):  # some clients send an extra line end after a body
        del buffer[:2]
    end = buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        if len(buffer) >= MAX_HEAD_BYTES:
            raise Malformed(431, "the headers are too long")
        return None
    text = buffer[: end + 2].decode("latin-1")
    del buffer[: end + 4]
    first, _, lines = text.partition("\r\n")
    match = _REQUEST.fullmatch(first)
    if match is None:
        raise Malformed(400, "this is no HTTP/1.1 request")
    method, target, version = match.groups()
    if version not in _VERSIONS:
        raise Malformed(505, f"HTTP/{version} is not spoken here, but HTTP/1.1")
    return _head(method, _origin(target), _headers(lines), modern=version == "1.1")


def _origin(target: str) -> str:
    if target.startswith("/") or target == "*":
        return target
    _, separator, rest = target.partition("://")
    if not separator:
        raise Malformed(400, "the target is neither a path nor a URL")
    _, slash, path = rest.partition("/")
    return slash + path or "/"


def _headers(lines: str) -> Headers:
    """The headers, each of whose lines is whole: only then there are as many as line feeds."""
    count = lines.count("\n")
    if count > _MAX_HEADERS:
        raise Malformed(431, "there are too many headers")
    pairs = [(name, value.strip(" \t")) for name, value in _HEADER.findall(lines)]
    if len(pairs) != count:
        raise Malformed(400, "a header is malformed")
    return Headers(pairs)


def _head(method: str, target: str, headers: Headers, *, modern: bool) -> RequestHead:
    if len(headers.getlist("host")) > 1:
        raise Malformed(400, "there is more than one Host")
    connection = headers.get("connection")
    tokens = _tokens_in(connection) if connection else ()
    return RequestHead(
        method=method,
        target=target,
        headers=headers,
        length=_length(headers, modern=modern),
        keep_alive="close" not in tokens if modern else "keep-alive" in tokens,
        chunks_allowed=modern,
        expects_continue=modern and headers.get("expect", "").lower() == "100-continue",
    )


def _tokens_in(connection: str) -> set[str]:
    return {token.strip() for token in connection.lower().split(",")}


def _length(headers: Headers, *, modern: bool) -> int | None:
    lengths = headers.getlist("content-length")
    codings = ", ".join(headers.getlist("transfer-encoding")).lower()
    if codings and lengths:
        raise Malformed(400, "both Content-Length and Transfer-Encoding")
    if codings:
        if not modern:  # an HTTP/1.0 server in front would have read no chunks
            raise Malformed(400, "HTTP/1.0 has no Transfer-Encoding")
        if codings != "chunked":
            raise Malformed(501, f"transfer encoding {codings[:40]} is not known here")
        return None
    if not lengths:
        return 0
    length = lengths.pop()
    if lengths or not length.isascii() or not length.isdecimal() or len(length) > 18:  # noqa: PLR2004 - digits of 2^60
        raise Malformed(400, "Content-Length is malformed")
    return int(length)


class BodyParser:
    """A request's body as it arrives."""

    def __init__(self, length: int | None, limit_bytes: int) -> None:
        if length is not None and length > limit_bytes:
            raise Malformed(413, f"the body is larger than {limit_bytes} bytes")
        self._chunked = length is None
        self._missing_bytes = length or 0
        self._limit_bytes = limit_bytes
        self._content = bytearray()  # one object, however many chunks the body comes in
        self._size_bytes = 0
        self._ends_chunk = False
        self._in_trailers = False

    def take(self, buffer: bytearray) -> bool:
        """Take the body's bytes off the buffer; True once the body is complete."""
        if not self._chunked:
            self._move(buffer)
            return self._missing_bytes == 0
        while True:
            if self._missing_bytes:
                self._move(buffer)
                if self._missing_bytes:
                    return False
                self._ends_chunk = True
            line = _line_in(buffer)
            if line is None:
                return False
            if self._take_line(line):
                return True

    def content(self) -> bytes:
        return bytes(self._content)

    def _move(self, buffer: bytearray) -> None:
        if not buffer or not self._missing_bytes:
            return
        part = buffer[: self._missing_bytes]
        del buffer[: len(part)]
        self._content += part
        self._missing_bytes -= len(part)

    def _take_line(self, line: bytes) -> bool:
        if self._ends_chunk:
            if line:
                raise Malformed(400, "a chunk is longer than its size")
            self._ends_chunk = False
        elif self._in_trailers:
            return not line
        else:
            self._begin_chunk(line.partition(b";")[0].strip(b" \t"))
        return False

    def _begin_chunk(self, size: bytes) -> None:
        if not _HEX.fullmatch(size):
            raise Malformed(400, "a chunk's size is malformed")
        self._missing_bytes = int(size, 16)
        self._size_bytes += self._missing_bytes
        self._in_trailers = not self._missing_bytes
        if self._size_bytes > self._limit_bytes:
            raise Malformed(413, f"the body is larger than {self._limit_bytes} bytes")


def _line_in(buffer: bytearray) -> bytes | None:
    end = buffer.find(b"\r\n", 0, _MAX_LINE_BYTES)
    if end < 0:
        if len(buffer) >= _MAX_LINE_BYTES:
            raise Malformed(400, "a line of a chunked body is too long")
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 2]
    return line
