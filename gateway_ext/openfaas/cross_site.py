"""Refuses requests that another site's page makes a browser send with stored credentials; pure."""

from collections.abc import Iterable

from gateway_ext.errors import CrossSite

_SCHEME = b"x-forwarded-proto"  # of a request to a proxy that speaks TLS
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
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found[name] = found[name] + b", " + value if name in found else value
    site = found.get(b"sec-fetch-site", b"none")
    followed = reading and (
        found.get(b"sec-fetch-mode") == b"navigate" and found.get(b"sec-fetch-dest") == b"document"
    )
    if not followed and site not in _OURS:
        raise CrossSite("another site's page sent the request")
    origin = found.get(b"origin")
    if origin is None:
        return
    scheme, _, host = origin.partition(b"://")
    # What a browser itself calls the same origin has the same scheme, whatever is in between.
    is_ours = (
        site == b"same-origin" or scheme == found.get(_SCHEME, b"http").partition(b",")[0].lower()
    )
    if host != found.get(b"host") or not is_ours:
        raise CrossSite(f"the page of {origin.decode(errors='replace')} sent the request")
