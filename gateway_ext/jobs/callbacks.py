"""Callbacks: which URLs are accepted, where they may lead, and how results are posted to them."""

import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from random import Random
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver
from yarl import URL

from common.http.asgi import Header
from common.telemetry.traces import SpanKind, TraceContext
from gateway_ext.calls.passed_headers import asked_wait_s
from gateway_ext.errors import BadRequest
from gateway_ext.jobs.attempts import (
    AttemptOutcome,
    JobDead,
    JobDone,
    JobEnding,
    RetryPolicy,
    TryAgain,
)
from gateway_ext.jobs.values import (
    AsyncCall,
    CallResult,
    Job,
    JobKind,
    JobLane,
    MemoryBody,
    StoredBody,
)
from gateway_ext.tracing.tracer import CallTracer, carrying, trace_headers_in

_NOT_PASSED_ON = frozenset(
    {
        *("connection", "content-length", "host", "keep-alive", "te", "trailer", "upgrade"),
        *("proxy-authenticate", "proxy-authorization", "transfer-encoding", "expect"),
        *("x-call-id", "x-duration-seconds", "x-function-status", "x-function-name"),
        *("traceparent", "tracestate"),
    }
)
_REQUEST_TIMEOUT = 408
_FIRST_OF_SERVER = 500
_CONNECT_S = 10.0
# A receiver that reads its result more slowly than this is given up.
_SLOWEST_BYTES_S = 128 << 10


_Address = IPv4Address | IPv6Address
_LONGEST = 8192
_LONGEST_NAME = 200
_NAT64 = IPv6Network("64:ff9b::/96")
_SCHEMES = frozenset({"http", "https"})
_LOCALHOST = "localhost"
# Paths of this gateway that a callback may be sent to: it calls another function.
_CALL = "/function/"
_CALLS = (_CALL, "/async-function/")
# The system reads such a name as an address: `127.1`, `0x7f000001`.
_NUMERIC_END = re.compile(r"(^|\.)(\d+|0x[0-9a-f]*)\.?$", re.IGNORECASE)


class NotPublic(OSError):
    """The name resolves to addresses of private networks, or of this machine, only."""


class CallbackRule:
    """Where callbacks may go: to public addresses, to `allowed` ones, and to our own functions.

    `allowed` has networks, addresses, and names of hosts, with a port or for any port. `own` is
    where this gateway listens.
    """

    def __init__(self, *, allowed: Iterable[str] = (), own: tuple[str, int] | None = None) -> None:
        self._own = own
        self._networks: list[IPv4Network | IPv6Network] = []
        self._names: set[tuple[str, int | None]] = set()
        for entry in allowed:
            self._allow(entry)

    def target(self, url: str) -> URL:
        """Raise BadRequest if no callback may be sent there; its name is looked up when one is."""
        parts = _split(url)
        assert parts.host is not None, "it was split"
        assert parts.port is not None, "http and https have ports"
        host = parts.host.lower()
        if self.names(host, parts.port):
            return parts
        if host == _LOCALHOST and (own := self._own_loopback(parts)) is not None:
            return parts.with_host(own)
        literal = _literal(host)
        if literal is None:
            refused = host == _LOCALHOST or _NUMERIC_END.search(host) is not None
        else:
            refused = not self.permits(str(literal)) and not self._is_own_function(literal, parts)
        if refused:
            why = f"callbacks to {host} are not allowed; callback_allowed can allow them"
            raise BadRequest(f"X-Callback-Url: {why}")
        return parts

    def calls_function(self, target: URL) -> bool:
        """Whether this gateway answers a target once a function of its own has ended."""
        host = (target.host or "").lower()
        literal = _literal((host == _LOCALHOST and self._own_loopback(target)) or host)
        called = target.path.startswith(_CALL)
        return called and literal is not None and self._is_own_function(literal, target)

    def permits(self, address: str) -> bool:
        if is_public(address):
            return True
        literal = _mapped(ip_address(address.partition("%")[0]))
        return any(literal in network for network in self._networks)

    def names(self, host: str, port: int) -> bool:
        return (host, port) in self._names or (host, None) in self._names

    def _allow(self, entry: str) -> None:
        try:
            self._networks.append(ip_network(entry, strict=False))
            return
        except ValueError:
            pass
        wrong = BadRequest(f"callback_allowed: {entry!r} is no network, address or host")
        try:
            parts = urlsplit(f"//{entry}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise wrong from error
        if not host or parts.netloc != entry or "@" in entry:
            raise wrong
        self._names.add((host, port))

    def _own_loopback(self, parts: URL) -> str | None:
        loopbacks = ("127.0.0.1", "::1")
        own = (ip for ip in loopbacks if self._is_own_function(ip_address(ip), parts))
        return next(own, None)

    def _is_own_function(self, address: _Address, parts: URL) -> bool:
        if self._own is None or parts.port != self._own[1]:
            return False
        if not parts.path.startswith(_CALLS):
            return False
        listens = _mapped(ip_address(self._own[0].partition("%")[0]))
        address = _mapped(address)
        if not listens.is_unspecified:
            return address == listens
        if listens.version != address.version and listens.version == IPv4Address(0).version:
            return False
        return address.is_loopback or _is_of_this_machine(address)


class PermittedResolver(AbstractResolver):
    """Resolves to permitted addresses only; the checked address is the one connected to."""

    def __init__(self, resolver: AbstractResolver, rule: CallbackRule) -> None:
        self._resolver = resolver
        self._rule = rule

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raise NotPublic if no address of the host is permitted."""
        results = await self._resolver.resolve(host, port, family)
        if self._rule.names(host.lower(), port):
            return results
        permitted = [result for result in results if self._rule.permits(result["host"])]
        if not permitted:
            raise NotPublic(f"{host} is not a public address")
        return permitted

    async def close(self) -> None:
        await self._resolver.close()


def callback_lane(url: str) -> JobLane:
    """The lane of callbacks to one host and port, or to one function of this machine's gateway.

    A function takes as long as it may: those of others do not wait for it.
    """
    try:
        parts = _split(url)
    except BadRequest:  # another version accepted it; sending it fails
        return JobLane(JobKind.CALLBACK, "")
    host = parts.host or ""
    literal = _literal(host)
    here = host.lower() == _LOCALHOST or (literal is not None and _mapped(literal).is_loopback)
    lane = f"{host}:{parts.port}"
    if here and parts.path.startswith(_CALL):
        name = parts.path.split("/")[2][:_LONGEST_NAME]
        lane += f"/{name}" if name else ""
    return JobLane(JobKind.CALLBACK, lane)


def is_public(address: str) -> bool:
    """Whether an address is public: not of a private network, not of this machine."""
    literal = ip_address(address.partition("%")[0])
    if isinstance(literal, IPv6Address):
        in_nat64 = IPv4Address(int(literal) & 0xFFFF_FFFF) if literal in _NAT64 else None
        literal = literal.ipv4_mapped or literal.sixtofour or in_nat64 or literal
    return literal.is_global and not literal.is_multicast


def _split(url: str) -> URL:
    """Raise BadRequest if the HTTP client cannot read the URL."""
    wrong = BadRequest("X-Callback-Url is not an http or https URL")
    try:
        parts = URL(url) if len(url) <= _LONGEST else URL()
        complete = parts.scheme in _SCHEMES and parts.host and parts.port
    except ValueError as error:
        raise wrong from error
    if not complete:
        raise wrong
    return parts


def _literal(host: str) -> _Address | None:
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _mapped(address: _Address) -> _Address:
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


def _is_of_this_machine(address: _Address) -> bool:
    """Whether this machine would send to itself: then the address is also where it sends from."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))  # of UDP: nothing is sent
        except OSError:
            return False
        return ip_address(probe.getsockname()[0]) == address


@dataclass(frozen=True, slots=True)
class CallbackSender:
    """Posts results; a receiver that fails is tried again, one that refuses is not."""

    session: aiohttp.ClientSession
    rule: CallbackRule
    policy: RetryPolicy
    answer_s: float  # that a receiver has, beside the time that the body may take
    now_s: Callable[[], float]
    chance: Random
    tracer: CallTracer

    async def handle(self, job: Job) -> JobEnding:
        assert job.result is not None  # a job that waits for its callback has a result
        tried = await self._post(job.call, job.result, job.body)
        if tried is None:
            failure = job.result.failure
            return JobDead(failure, job.result.status) if failure else JobDone()
        verdict = self.policy.verdict(tried, job, self.now_s(), self.chance.random())
        why = f"callback: {verdict.why if verdict else tried.why}"
        if isinstance(verdict, TryAgain):
            return replace(verdict, why=why)
        return JobDead(why, tried.status)

    async def _post(
        self, call: AsyncCall, result: CallResult, body: StoredBody
    ) -> AttemptOutcome | None:
        """None where the result was delivered; the request belongs to the call's trace."""
        name, parent = f"callback {call.function}", trace_headers_in(call.headers)
        with self.tracer.step(call.id, name, parent, SpanKind.CLIENT) as step:
            tried = await self._sent(call, result, body, step.trace)
            step.error = "" if tried is None else tried.why
        return tried

    async def _sent(
        self, call: AsyncCall, result: CallResult, body: StoredBody, trace: TraceContext
    ) -> AttemptOutcome | None:
        headers = [*_headers(call, result), *map(_shown, carrying((), trace))]
        headers.append(("content-length", str(body.size_bytes)))
        data = body.content if isinstance(body, MemoryBody) else body.pieces()
        try:
            # The call may have been stored under another rule, or by another gateway.
            target = self.rule.target(call.callback_url)
        except BadRequest as error:
            return AttemptOutcome(0, str(error), broken=False)
        called = self.rule.calls_function(target)
        # A function of this gateway has its own time limit, which the gateway keeps.
        whole_s = None if called else self.answer_s + body.size_bytes / _SLOWEST_BYTES_S
        timeout = aiohttp.ClientTimeout(whole_s, sock_connect=_CONNECT_S)
        # A redirect could lead to a private address, and would turn the POST into a GET.
        sending = self.session.post(
            target, data=data, headers=headers, allow_redirects=False, timeout=timeout
        )
        try:
            async with sending as answer:
                if called:  # a function whose caller leaves before the end is broken off
                    async for _ in answer.content.iter_any():
                        pass
                return self._tried(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # aiohttp wraps the resolver's error, which names the refused address.
            why = f"{type(error).__name__}: {error.__cause__ or error}"
            return AttemptOutcome(0, why, broken=True)

    def _tried(self, answer: aiohttp.ClientResponse) -> AttemptOutcome | None:
        if answer.ok and answer.status < 300:  # noqa: PLR2004 - the statuses of success
            return None
        asked_s = asked_wait_s(answer.raw_headers, self.now_s())
        broken = answer.status == _REQUEST_TIMEOUT or answer.status >= _FIRST_OF_SERVER
        why = f"it answered {answer.status}"
        return AttemptOutcome(answer.status, why, broken, retry_after_s=asked_s)


def callback_session(rule: CallbackRule) -> aiohttp.ClientSession:
    resolver = PermittedResolver(DefaultResolver(), rule)
    connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


def _headers(call: AsyncCall, result: CallResult) -> list[tuple[str, str]]:
    own = [shown for shown in map(_shown, result.headers) if shown[0] not in _NOT_PASSED_ON]
    return [
        *own,
        ("x-call-id", call.id),
        ("x-duration-seconds", f"{result.duration_s:f}"),
        ("x-function-status", str(result.status)),
        ("x-function-name", str(call.function)),
    ]


def _shown(header: Header) -> tuple[str, str]:
    return header[0].decode("latin-1").lower(), header[1].decode("latin-1")
