"""Names in which a gateway answers, and requests of other sites' pages, which it refuses; pure."""

import re
from collections.abc import Iterable

from gateway_ext.errors import BadRequest, CrossSite, WrongHost

_EVERY_HOST = "*"
_PORT = rb"(?::\d{1,5})?"
_LOCALHOST = rb"(?:[\w-]+\.)*localhost\.?"
_MAPPED = rb"\[::ffff:(?:127(?:\.\d{1,3}){3}|7f[0-9a-f]{2}:[0-9a-f]{1,4})\]"
_LOOPBACK = re.compile(
    rb"(?:%b|127(?:\.\d{1,3}){1,3}|\[::1\]|%b)%b" % (_LOCALHOST, _MAPPED, _PORT), re.IGNORECASE
)
# Nobody can have an address lead elsewhere.
_ADDRESS = re.compile(
    rb"(?:%b|\d{1,3}(?:\.\d{1,3}){3}|\[[0-9a-f:.]+\])%b" % (_LOCALHOST, _PORT), re.IGNORECASE
)


class HostNames:
    """The hosts that a setting lists; with a port, or for any port; `*` is every host."""

    def __init__(self, hosts: Iterable[str] = (), setting: str = "function_hosts") -> None:
        self._hosts = frozenset(_host(host, setting) for host in hosts)
        self.every = _EVERY_HOST.encode() in self._hosts

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def __contains__(self, host: bytes) -> bool:
        if not self._hosts or self.every:
            return self.every
        host = host.lower()
        name, colon, port = host.rpartition(b":")
        return host in self._hosts or bool(colon and port.isdigit() and name in self._hosts)


class AnsweredHosts:
    """The hosts in whose names a gateway that listens at `address` answers.

    On loopback these are loopback's own and those listed. Elsewhere all, or, where names are
    listed, these, loopback's and every address. Those `of_functions` need not be listed again.
    """

    def __init__(self, address: str, listed: HostNames, of_functions: HostNames) -> None:
        self._listed = listed
        self._of_functions = HostNames() if of_functions.every else of_functions
        self._is_local = is_loopback(address)
        self.every = listed.every or not (listed or self._is_local)

    def check(self, host: bytes) -> None:
        """WrongHost if a Host header names another host; programs may leave it out."""
        if self.every or not host or host in self._listed or host in self._of_functions:
            return
        if not (_LOOPBACK if self._is_local else _ADDRESS).fullmatch(host):
            raise WrongHost(host)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches what listens at `HOST:PORT`."""
    return _LOOPBACK.fullmatch(address.encode()) is not None


def _host(entry: str, setting: str) -> bytes:
    """A host as browsers name it in a request; BadRequest if it is none."""
    if not entry.isascii() or not entry.strip() or "/" in entry:
        raise BadRequest(f"{setting}: {entry!r} is no host; write it as in functions.example")
    return entry.lower().encode()


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
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        values[name] = values[name] + b", " + value if name in values else value
    site = values.get(b"sec-fetch-site", b"none")
    followed = reading and (
        values.get(b"sec-fetch-mode") == b"navigate"
        and values.get(b"sec-fetch-dest") == b"document"
    )
    if not followed and site not in _OURS:
        raise CrossSite("another site's page sent the request")
    origin = values.get(b"origin")
    if origin is None:
        return
    scheme, _, host = origin.partition(b"://")
    # What a browser itself calls the same origin has the same scheme, whatever is in between.
    is_ours = (
        site == b"same-origin" or scheme == values.get(_SCHEME, b"http").partition(b",")[0].lower()
    )
    if host != values.get(b"host") or not is_ours:
        raise CrossSite(f"the page of {origin.decode(errors='replace')} sent the request")
