"""Keeps functions' pages apart from the gateway's own, with which they share an origin; pure.

A browser sends an administrator's credentials for /ui and /system to every path of the host.
"""

from collections.abc import Callable
from operator import itemgetter

from common.http.asgi import Header
from gateway_ext.calls.call_headers import RequestHeaders
from gateway_ext.errors import CrossSite
from gateway_ext.host_names import HostNames

# Without `allow-same-origin` a document's origin is its own: it equals no other, not even that of
# its next page. A sandbox of the function's own can only add to this one.
SANDBOX: tuple[Header, ...] = (
    (
        b"content-security-policy",
        b"sandbox allow-downloads allow-forms allow-modals allow-popups"
        b" allow-popups-to-escape-sandbox allow-scripts",
    ),
    (b"x-content-type-options", b"nosniff"),
)
_COOKIE = b"set-cookie"
# These apply to a whole host: its storage, its service workers, its connections, its reports.
_HOST_WIDE = frozenset(
    {
        *(_COOKIE, b"alt-svc", b"clear-site-data", b"nel", b"report-to"),
        *(b"service-worker-allowed", b"strict-transport-security"),
    }
)
_NAME = itemgetter(0)


class BrowserGuard:
    """Confines what functions send to browsers, except at `hosts`.

    `is_ours` says whether an Authorization header has the gateway's own credentials, which no
    function gets at any host.
    """

    __slots__ = ("_hosts", "is_ours")

    def __init__(
        self,
        hosts: HostNames | None = None,
        is_ours: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        self._hosts = HostNames() if hosts is None else hosts
        self.is_ours = is_ours

    def admit(self, asked: RequestHeaders) -> None:
        """Pass on the headers that were held back, but the gateway's credentials.

        CrossSite if the request is for a service worker, which would answer for other pages.
        """
        for name, value in asked.held:
            if name == b"authorization":
                if self.is_ours(value):
                    continue
            elif asked.host not in self._hosts:
                raise CrossSite("a function cannot give this host's pages a service worker")
            if name not in asked.named:
                asked.lines += (name, b": ", value, b"\r\n")

    def confine(self, headers: list[Header], host: bytes, site: bytes) -> list[Header]:
        """The headers of an answer as browsers may get them; cookies hold below the path `site`."""
        if self._hosts and host in self._hosts:
            return headers
        if not _HOST_WIDE.isdisjoint(map(_NAME, headers)):
            headers = _without_host_wide(headers, site)
        headers += SANDBOX
        return headers


def _without_host_wide(headers: list[Header], site: bytes) -> list[Header]:
    kept = [header for header in headers if header[0] not in _HOST_WIDE]
    cookies = (value for name, value in headers if name == _COOKIE)
    return [*kept, *((_COOKIE, _confined_cookie(value, site)) for value in cookies)]


def _confined_cookie(cookie: bytes, site: bytes) -> bytes:
    """The cookie for paths below `site` of this host only."""
    pair, *attributes = cookie.split(b";")
    path = site
    kept = [pair]
    for attribute in attributes:
        name, _, value = attribute.partition(b"=")
        name, value = name.strip().lower(), value.strip()
        if name == b"path":
            path = value if value.startswith(site + b"/") else site  # the last one counts
        elif name != b"domain":
            kept.append(attribute)
    return b";".join([*kept, b" Path=" + path])
