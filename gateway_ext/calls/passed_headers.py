"""The request headers passed to a function, and the response headers passed back; pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from operator import itemgetter

from common.data_handles import node_of
from common.foreign_text import plain
from common.http.asgi import Header
from common.numerals import natural
from common.telemetry.traces import TRACEPARENT, TRACESTATE
from gateway_ext.calls.learned import GpuReport
from gateway_ext.errors import BadRequest, CrossSite, Unsupported
from gateway_ext.sites import HostNames

CALL_ID = b"x-call-id"
DURATION = b"x-duration-seconds"
START_TIME = b"x-start-time"
MODELS = b"x-gpu-models"
GPU_TRACE = b"x-gpu-trace"
LOCAL = b"x-gpu-local"
TURNS = b"x-gpu-turns"
# Handles of data, in a request for the function and in a response for the caller.
DATA = b"x-gpu-data"
# What a function reports of its GPU work, before its answer or behind a stream.
REPORTED = frozenset({MODELS, GPU_TRACE, LOCAL})

_TRACE, _STATE = TRACEPARENT.encode(), TRACESTATE.encode()
_GPU = b"x-gpu-"
_GPU_LENGTH = len(_GPU)
# What reads headers as variables, as CGI does, takes this sign for a dash.
_UNDERSCORE = b"_"
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    }
)
# Headers that are passed on only if `BrowserGuard` says so.
_HELD = frozenset({b"authorization", b"service-worker"})
# Headers that the gateway writes itself, or that a function has no use for.
_READ = (_HOP_BY_HOP | _HELD) | {
    *(b"content-length", b"expect", b"host", b"x-forwarded-for", b"x-forwarded-host"),
    *(CALL_ID, START_TIME, _TRACE, _STATE),
}
_NOT_BACK = _HOP_BY_HOP | {CALL_ID, START_TIME, DURATION}
# Headers whose value is kept as it is, in the field of `RequestHeaders` of this name.
_KEPT = {b"host": "host", b"x-forwarded-host": "forwarded_host", b"upgrade": "upgrade"}
_CALL_ID_BYTES = 256
_SECONDS_DIGITS = 9
MOST_DATA = 16  # handles, beside the word
_MOST_SHOWN = 80  # characters of what is no handle
_DATA_WISH = "handle"  # the caller wants a handle of the result
_H2C = b"h2c"


@dataclass(slots=True)
class RequestHeaders:
    """The parsed headers of a request; `lines` are passed on to the function unchanged.

    `held` are headers that are not among them until `BrowserGuard` has seen them. `near` is the
    node that has the data which the request names, if it names any.
    """

    lines: list[bytes] = field(default_factory=list)
    call_id: bytes = b""
    trace: bytes = b""
    trace_state: bytes = b""
    host: bytes = b""
    forwarded_host: bytes = b""
    forwarded_for: list[bytes] = field(default_factory=list)
    length: int | None = None
    chunked: bool = False
    upgrade: bytes = b""
    named: set[bytes] = field(default_factory=set)
    near: str = ""
    held: tuple[Header, ...] = ()

    @property
    def has_body(self) -> bool:
        return self.chunked or bool(self.length)


def read_request(headers: Iterable[Header]) -> RequestHeaders:
    """The names of the headers are in lower case."""
    request = RequestHeaders()
    add = request.lines.extend
    data: list[bytes] = []
    for name, value in headers:
        if name in _READ:
            _note(request, name, value)
        elif _UNDERSCORE in name and _is_own(name.replace(_UNDERSCORE, b"-")):
            continue
        elif name[:_GPU_LENGTH] != _GPU:
            add((name, b": ", value, b"\r\n"))
        elif name == DATA:
            data.append(value)
            add((name, b": ", value, b"\r\n"))
    if data:
        request.near = _node_of_data(b",".join(data))
    if request.chunked:
        request.length = None
    if request.named:
        request.lines = _without(request.lines, request.named)
    if request.upgrade and (request.upgrade.lower() != _H2C or request.has_body):
        raise Unsupported(f"an upgrade to {request.upgrade.decode('latin-1')} is not supported")
    return request


def request_head(
    method: bytes,
    target: Sequence[bytes],
    request: RequestHeaders,
    extra: Sequence[bytes],
    client: bytes,
) -> bytes:
    """`extra` are whole lines."""
    lines = [method, b" ", *target, b" HTTP/1.1\r\nhost: ", request.host or b"function", b"\r\n"]
    lines += request.lines
    lines += extra
    forwarded = b", ".join((*request.forwarded_for, client) if client else request.forwarded_for)
    if forwarded:
        lines += (b"x-forwarded-for: ", forwarded, b"\r\n")
    shown = request.forwarded_host or request.host
    if shown:
        lines += (b"x-forwarded-host: ", shown, b"\r\n")
    if request.length is not None:
        lines.append(b"content-length: %d\r\n\r\n" % request.length)
    elif request.chunked:
        lines.append(b"transfer-encoding: chunked\r\n\r\n")
    else:
        lines.append(b"\r\n")
    return b"".join(lines)


def read_response(headers: Iterable[Header]) -> tuple[list[Header], GpuReport]:
    """The headers to pass back, and the function's report; the names are in lower case."""
    models = trace_report = local = turns = b""
    back: list[Header] = []
    named: set[bytes] = set()
    for header in headers:
        name = header[0]
        if name in _NOT_BACK:
            if name == b"connection":
                named |= _names(header[1])
        elif name[:_GPU_LENGTH] != _GPU or name == DATA:
            back.append(header)
        elif name == MODELS:
            models = header[1]
        elif name == GPU_TRACE:
            trace_report = header[1]
        elif name == LOCAL:
            local = header[1]
        elif name == TURNS:
            turns = header[1]
    named -= {b"close"} | _HOP_BY_HOP
    if named:
        back = [header for header in back if header[0] not in named]
    return back, GpuReport(models, trace_report, local, turns)


def read_trailers(trailers: Mapping[bytes, bytes]) -> GpuReport:
    """The report behind a stream: its head had what was known by then."""
    return GpuReport(*(trailers.get(name, b"") for name in (MODELS, GPU_TRACE, LOCAL)))


def call_id_in(value: bytes) -> bytes:
    """A client's id of its call, without what no log and no terminal can show."""
    return plain(value[:_CALL_ID_BYTES].decode("latin-1"), "").encode("latin-1")


def asked_wait_s(headers: Sequence[Header], now_s: float) -> float:
    """The seconds that a Retry-After asks for, given as seconds or a date; 0 without one."""
    raw = next((value for name, value in headers if name.lower() == b"retry-after"), b"")
    text = raw.decode("latin-1").strip()
    if (wait_s := natural(text, _SECONDS_DIGITS)) is not None:
        return float(wait_s)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_s)
    except (ValueError, OverflowError):  # OverflowError: a year beyond what the platform represents
        return 0.0


def _is_own(name: bytes) -> bool:
    """Whether no client's header of this name reaches a function as it is."""
    return name in _READ or name.startswith(_GPU)


def _note(request: RequestHeaders, name: bytes, value: bytes) -> None:
    if name in _KEPT:
        setattr(request, _KEPT[name], value)
    elif name == b"content-length":
        if not value.isdigit():
            raise BadRequest("Content-Length is no number")
        request.length = int(value)
    elif name == b"transfer-encoding":
        request.chunked = True
    elif name == CALL_ID:
        request.call_id = call_id_in(value)
    elif name in _HELD:
        request.held += ((name, value),)
    elif name == _TRACE:
        # Several Content-Length headers together are invalid: none of them can be trusted.
        request.trace = b",".join((request.trace, value)) if request.trace else value
    elif name == _STATE:
        request.trace_state = (
            b",".join((request.trace_state, value)) if request.trace_state else value
        )
    elif name == b"x-forwarded-for":
        request.forwarded_for.append(value)
    elif name == b"connection":
        request.named |= _names(value) - {b"close"} - _HOP_BY_HOP


def _node_of_data(value: bytes) -> str:
    """The node of the first handle in a list; empty if there is none. BadRequest for no list."""
    items = [item.strip() for item in value.decode("latin-1").split(",")]
    handles = [item for item in items if item != _DATA_WISH]
    if len(handles) > MOST_DATA:
        raise BadRequest(f"X-Gpu-Data lists more than {MOST_DATA} handles")
    nodes = [node_of(handle) for handle in handles]
    if None in nodes:
        word = plain(handles[nodes.index(None)][:_MOST_SHOWN])
        gives = "context.put gives one, and so does the word handle"
        raise BadRequest(f"X-Gpu-Data: {word!r} is no handle ({gives})")
    return nodes[0] if nodes and nodes[0] else ""


def _names(value: bytes) -> set[bytes]:
    return {name.strip().lower() for name in value.split(b",")}


def _without(lines: list[bytes], names: set[bytes]) -> list[bytes]:
    """The lines without the headers that `Connection` named; four items are one line."""
    kept = (at for at in range(0, len(lines), 4) if lines[at] not in names)
    return [item for at in kept for item in lines[at : at + 4]]


# Keeps functions' pages apart from the gateway's own, with which they share an origin.
# A browser sends an administrator's credentials for /ui and /system to every path of the host.

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
