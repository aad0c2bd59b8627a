"""Refuses requests that another site's page makes a browser send with stored credentials; pure."""

from collections.abc import Iterable

from gateway_ext.errors import CrossSite

_OURS = frozenset({b"same-origin", b"none"})  # none: a person typed the address

# Of every answer that only an administrator gets: no page shows, frames, embeds or runs it.
FOR_NO_PAGE: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


def refuse_other_sites(headers: Iterable[tuple[bytes, bytes]], *, reading: bool = False) -> None:
    """CrossSite if a browser's headers name another site; programs send neither header.

    A link on another site's page may lead here if the request only reads. The origin of a
    sandboxed page, `null`, is another site too.
    """
    found = dict(headers)
    followed = reading and (
        found.get(b"sec-fetch-mode") == b"navigate" and found.get(b"sec-fetch-dest") == b"document"
    )
    if not followed and found.get(b"sec-fetch-site", b"none") not in _OURS:
        raise CrossSite("another site's page sent the request")
    origin = found.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != found.get(b"host"):
        raise CrossSite(f"the page of {origin.decode(errors='replace')} sent the request")
