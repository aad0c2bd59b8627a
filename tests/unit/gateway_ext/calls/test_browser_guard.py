"""What functions and browsers may send each other through the gateway."""

import pytest

from common.http.asgi import Header
from gateway_ext.calls.passed_headers import SANDBOX, BrowserGuard, RequestHeaders, read_request
from gateway_ext.errors import BadRequest, CrossSite
from gateway_ext.openfaas.basic_auth import Auth, BasicCredentials
from gateway_ext.sites import HostNames

OURS = BasicCredentials("admin", "secret")
SITE, HOST = b"/function/f", b"gpus.example:8080"
GUARD = BrowserGuard(is_ours=Auth(OURS).holds)
WORKER = (b"service-worker", b"script")


def admitted(*headers: Header, guard: BrowserGuard = GUARD) -> bytes:
    """The lines that the function gets."""
    asked: RequestHeaders = read_request([(b"host", HOST), *headers])
    guard.admit(asked)
    return b"".join(asked.lines)


def confined(*headers: Header, guard: BrowserGuard = GUARD) -> list[Header]:
    """What a browser gets beside the sandbox."""
    found = guard.confine(list(headers), HOST, SITE)
    assert tuple(found[-len(SANDBOX) :]) == SANDBOX
    return found[: -len(SANDBOX)]


@pytest.mark.parametrize(
    "header",
    [OURS.header, OURS.header.replace("Basic ", "bAsIC   "), OURS.header + "  "],
)
def test_own_credentials_reach_no_function(header: str) -> None:
    assert admitted((b"authorization", header.encode()), (b"a", b"b")) == b"a: b\r\n"


def test_credentials_for_the_function_reach_it() -> None:
    other = BasicCredentials("admin", "other").header.encode()
    for value in (other, b"Bearer abc", b"Basic !"):
        assert admitted((b"authorization", value)) == b"authorization: " + value + b"\r\n"
        named = (b"connection", b"authorization")
        assert admitted((b"authorization", value), named) == b""
    both = (b"authorization", OURS.header.encode()), (b"authorization", other)
    assert admitted(*both) == b"authorization: " + other + b"\r\n"


def test_service_worker_is_refused_except_at_a_host_of_functions() -> None:
    with pytest.raises(CrossSite, match="service worker"):
        admitted(WORKER)
    free = BrowserGuard(HostNames(["gpus.example"]))
    assert admitted(WORKER, guard=free) == b"service-worker: script\r\n"


@pytest.mark.parametrize(
    ("cookie", "kept"),
    [
        (b"a=1", b"a=1; Path=/function/f"),
        (b"a=1; Path=/; HttpOnly", b"a=1; HttpOnly; Path=/function/f"),
        (b"a=1; path=/function/f/x", b"a=1; Path=/function/f/x"),
        (b"a=1; Path=/function/f2", b"a=1; Path=/function/f"),
        (b"a=1; Path=/function/f/x; PATH = /", b"a=1; Path=/function/f"),
        (b"a=1;domain=example;Secure", b"a=1;Secure; Path=/function/f"),
        (b"a=1; Domain=.example; SameSite=None", b"a=1; SameSite=None; Path=/function/f"),
        (b"", b"; Path=/function/f"),
    ],
)
def test_cookies_hold_below_the_function_alone(cookie: bytes, kept: bytes) -> None:
    assert confined((b"set-cookie", cookie)) == [(b"set-cookie", kept)]


def test_headers_for_the_whole_host_are_dropped_and_others_are_not() -> None:
    whole = [
        *((b"clear-site-data", b'"*"'), (b"strict-transport-security", b"max-age=9")),
        *((b"service-worker-allowed", b"/"), (b"alt-svc", b'h2="x"'), (b"nel", b"{}")),
        (b"report-to", b"{}"),
    ]
    own = [(b"content-security-policy", b"sandbox allow-same-origin"), (b"location", b"/ui/")]
    assert confined(own[0], *whole, own[1]) == own


@pytest.mark.parametrize(
    ("hosts", "host", "found"),
    [
        ((), b"a", False),
        (("A.example",), b"a.EXAMPLE", True),
        (("a.example",), b"a.example:8080", True),
        (("a.example:80",), b"a.example:80", True),
        (("a.example:80",), b"a.example", False),
        (("a.example",), b"b.a.example", False),
        (("a.example",), b"", False),
        (("[::1]",), b"[::1]:8080", True),
        (("*",), b"anything", True),
    ],
)
def test_hosts_of_functions_are_named_with_or_without_a_port(
    hosts: tuple[str, ...], host: bytes, *, found: bool
) -> None:
    assert (host in HostNames(hosts)) is found


@pytest.mark.parametrize("host", ["", " ", "https://functions.example", "f\u00fcr.example"])
def test_entry_that_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(BadRequest, match="function_hosts"):
        HostNames([host])


def test_answers_at_a_host_of_functions_stay_as_they_are() -> None:
    headers = [(b"set-cookie", b"a=1; Path=/"), (b"clear-site-data", b'"*"')]
    guard = BrowserGuard(HostNames(["gpus.example:8080"]))
    assert guard.confine(list(headers), HOST, SITE) == headers
