"""HTTP headers as lists of text, which JSON can store; pure."""

from collections.abc import Sequence

from common.http.asgi import Header


def headers_as_text(headers: Sequence[Header]) -> list[list[str]]:
    """Headers with every byte as the character of the same number."""
    return [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]


def headers_from_text(pairs: Sequence[Sequence[str]]) -> tuple[Header, ...]:
    """The headers that `headers_as_text` returned the text of."""
    return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs)
