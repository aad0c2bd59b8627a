"""Refuses requests that another site's page makes a browser send with stored credentials; pure."""

from collections.abc import Iterable

from gateway_ext.errors import CrossSite

_OURS = frozenset({b"same-origin", b"none"})  # none: a person typed the address


def refuse_other_sites(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """CrossSite if a browser's headers name another site; programs send neither header."""
    found = dict(headers)
    if found.get(b"sec-fetch-site", b"none") not in _OURS:
        raise CrossSite("another site's page sent the request")
    origin = found.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != found.get(b"host"):
        raise CrossSite(f"the page of {origin.decode(errors='replace')} sent the request")
