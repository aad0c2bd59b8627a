"""Which callback URLs are accepted, which addresses are public, and a callback's lane."""

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import SplitResult, urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult

from gateway_ext.errors import BadRequest
from gateway_ext.jobs.queue.job_values import JobKind, JobLane

_LONGEST = 8192
_NAT64 = IPv6Network("64:ff9b::/96")
_PORTS = {"http": 80, "https": 443}


class NotPublic(OSError):
    """The name resolves to an address of a private network or of this machine."""


class PublicResolver(AbstractResolver):
    """Resolves only to public addresses; the checked address is the one connected to."""

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host; NotPublic where one of them is not public."""
        found = await self._resolver.resolve(host, port, family)
        if not all(is_public(result["host"]) for result in found):
            raise NotPublic(f"{host} is not a public address")
        return found

    async def close(self) -> None:
        """Close the inner resolver."""
        await self._resolver.close()


def checked_url(url: str, *, private: bool) -> str:
    """The URL, if a callback may be sent there; BadRequest otherwise."""
    parts = _split(url)
    if len(url) > _LONGEST or parts is None:
        raise BadRequest("X-Callback-Url is not an http or https URL")
    host = parts.hostname or ""
    if not private and (host == "localhost" or (_is_literal(host) and not is_public(host))):
        raise BadRequest(f"X-Callback-Url: callbacks to {host} are not allowed")
    return url


def callback_lane(url: str) -> JobLane:
    """The lane of callbacks to one host and port."""
    parts = _split(url)
    assert parts is not None  # `checked_url` accepted it at the intake
    return JobLane(JobKind.CALLBACK, f"{parts.hostname}:{parts.port or _PORTS[parts.scheme]}")


def is_public(address: str) -> bool:
    """Whether an address is public: not of a private network, not of this machine."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        in_nat64 = IPv4Address(int(found) & 0xFFFF_FFFF) if found in _NAT64 else None
        found = found.ipv4_mapped or found.sixtofour or in_nat64 or found
    return found.is_global and not found.is_multicast


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if known else None


def _is_literal(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
