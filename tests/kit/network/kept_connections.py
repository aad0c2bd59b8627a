"""How many connections a client keeps."""

from common.http.client import HttpClient


def kept_connections(client: HttpClient) -> int:
    """The idle ones, to all addresses."""
    return sum(len(kept) for kept in client._idle.values())  # noqa: SLF001 - of no use to the product
