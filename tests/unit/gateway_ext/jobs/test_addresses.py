"""Where callbacks may go."""

import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from gateway_ext.errors import BadRequest
from gateway_ext.jobs.intake.callback_addresses import (
    NotPublic,
    PublicResolver,
    callback_lane,
    checked_url,
    is_public,
)


@pytest.mark.parametrize(
    "url",
    ["", "there", "ftp://there/", "file:///etc/passwd", "http://", "http:///x", "http://x:0/",
     "http://x:99999/", "http://[::1/", "gopher://x", "http://x/" + "y" * 9000],
)  # fmt: skip
def test_url_is_refused_when_it_is_no_http_url(url: str) -> None:
    with pytest.raises(BadRequest):
        checked_url(url, private=True)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "[::1]", "[fe80::1]", "0.0.0.0",
     "[::ffff:127.0.0.1]", "localhost", "100.64.0.1", "224.0.0.1"],
)  # fmt: skip
def test_private_address_is_refused_only_when_that_is_set(host: str) -> None:
    url = f"http://{host}/"
    assert checked_url(url, private=True) == url
    with pytest.raises(BadRequest, match="not allowed"):
        checked_url(url, private=False)


@pytest.mark.parametrize("url", ["https://example.com/x?y", "http://1.1.1.1:81/", "http://u:p@x/"])
def test_public_url_is_taken(url: str) -> None:
    assert checked_url(url, private=False) == url


def test_callbacks_to_one_host_and_port_share_a_lane() -> None:
    assert callback_lane("http://There/a") == callback_lane("http://there:80/b")
    assert callback_lane("http://there/") != callback_lane("https://there/")


def test_mapped_addresses_are_what_they_map() -> None:
    assert is_public("::ffff:1.1.1.1")
    assert not is_public("::ffff:10.0.0.1")
    assert is_public("64:ff9b::101:101")
    assert not is_public("64:ff9b::a00:1")
    assert is_public("2002:101:101::")
    assert not is_public("2002:a00:1::")


class _Resolver(AbstractResolver):
    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
            for address in self._addresses
        ]

    async def close(self) -> None:
        raise AssertionError("it was not closed")


async def test_name_that_resolves_to_a_private_address_too_is_refused() -> None:
    found = await PublicResolver(_Resolver("1.1.1.1")).resolve("x", 80)
    assert [one["host"] for one in found] == ["1.1.1.1"]
    with pytest.raises(NotPublic):
        await PublicResolver(_Resolver("1.1.1.1", "10.0.0.1")).resolve("x", 80)
