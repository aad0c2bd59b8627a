"""What a response's head must be beyond what the parser checks."""

from common.http.asgi import Header

_SWITCHING, _LEAST_STATUS, _MOST_STATUS = 101, 100, 599
_VERSIONS = frozenset({"1.0", "1.1"})
_MOST_DIGITS = 18  # of a length; Python reads no number of more than 4300 digits


class InvalidResponse(Exception):
    """The parser stops at what the peer sent."""


def check_head(version: str, status: int, headers: list[Header]) -> None:
    """Raise InvalidResponse for a response that others could read differently."""
    if version not in _VERSIONS:
        raise InvalidResponse(f"HTTP/{version}")
    if status == _SWITCHING or not _LEAST_STATUS <= status <= _MOST_STATUS:
        raise InvalidResponse(f"status {status}")
    codings = b", ".join(value for name, value in headers if name == b"transfer-encoding")
    if codings and codings.lower() != b"chunked":
        raise InvalidResponse(f"transfer encoding {codings[:40].decode('latin-1')}")
    for name, value in headers:
        if name == b"content-length" and (len(value) > _MOST_DIGITS or not value.isdigit()):
            raise InvalidResponse("a malformed Content-Length")
