"""Where callbacks may go."""

import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from gateway_ext.errors import BadRequest
from gateway_ext.jobs.callbacks import (
    CallbackRule,
    NotPublic,
    PermittedResolver,
    callback_lane,
    is_public,
)
from tests.kit.outcomes import instead_of, outcome
from tests.kit.worlds.job_world import ANYWHERE

PUBLIC = CallbackRule()
ALLOWED = CallbackRule(
    allowed=("10.1.0.0/16", "192.168.0.7", "gateway.openfaas:8080", "receiver", "[fd00::1]:99")
)


NO_URLS = [
    "", "there", "ftp://there/", "file:///etc/passwd", "http://", "http:///x", "http://x:0/",
    "http://x:99999/", "http://[::1/", "gopher://x", "http://x/" + "y" * 9000,
    "http://1.1.1.1\\@127.0.0.1/",
]  # fmt: skip


def test_url_is_refused_when_it_is_no_http_url() -> None:
    wrong = [
        (url, taken) for url in NO_URLS if (taken := instead_of(BadRequest, ANYWHERE.target, url))
    ]
    assert wrong == []


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "[::1]", "[fe80::1]", "0.0.0.0",
    "[::ffff:127.0.0.1]", "localhost", "LOCALHOST", "100.64.0.1", "224.0.0.1",
    # The system, or the HTTP client, reads these as addresses.
    "127.1", "2130706433", "0x7f.1", "0x7f000001", "0177.0.0.1", "127.0.0.1.",
    "\u2460\u2461\u2466.0.0.1", "127\u30020\u30020\u30021",
]  # fmt: skip


def test_private_addresses_are_refused_unless_they_are_allowed() -> None:
    urls = [f"http://{host}/" for host in PRIVATE]
    taken = [
        (url, found)
        for url in urls
        if (found := instead_of(BadRequest, PUBLIC.target, url, match="not allowed"))
    ]
    assert taken == []
    assert str(ANYWHERE.target("http://10.1.2.3/")) == "http://10.1.2.3/"


@pytest.mark.parametrize("url", ["https://example.com/x?y", "http://1.1.1.1:81/", "http://u:p@x/"])
def test_public_url_is_taken(url: str) -> None:
    assert PUBLIC.target(url).host


@pytest.mark.parametrize(
    ("host", "taken"),
    [
        ("10.1.2.3", True),
        ("[::ffff:10.1.2.3]", True),
        ("10.2.0.1", False),
        ("192.168.0.7:99", True),
        ("192.168.0.8", False),
        ("[fd00::1]:99", True),
        ("[fd00::1]", False),
    ],
)
def test_allowed_networks_are_taken(host: str, *, taken: bool) -> None:
    url = f"http://{host}/"
    if taken:
        assert ALLOWED.target(url).host
    else:
        with pytest.raises(BadRequest, match="callback_allowed"):
            ALLOWED.target(url)


@pytest.mark.parametrize("entry", ["", "10.0.0.0/33", "http://x/", "x/y", "u@x", "x:port", "[::1"])
def test_entry_that_is_no_network_and_no_host_is_refused(entry: str) -> None:
    with pytest.raises(BadRequest, match="callback_allowed"):
        CallbackRule(allowed=(entry,))


CALLED_BACK = (
    ("127.0.0.1", "http://127.0.0.1:8080/function/f", True),
    ("127.0.0.1", "http://127.0.0.1:8080/async-function/f?x", True),
    ("127.0.0.1", "http://127.0.0.1:8080/system/functions", False),
    ("127.0.0.1", "http://127.0.0.1:8080/function/../system/functions", False),
    ("127.0.0.1", "http://127.0.0.1:8080/function/%2e%2e/system/functions", False),
    ("127.0.0.1", "http://127.0.0.1:8081/function/f", False),
    ("127.0.0.1", "http://[::1]:8080/function/f", False),
    ("127.0.0.1", "http://127.0.0.2:8080/function/f", False),
    ("0.0.0.0", "http://127.0.0.2:8080/function/f", True),
    ("0.0.0.0", "http://[::1]:8080/function/f", False),
    ("::", "http://[::1]:8080/function/f", True),
    ("::", "http://127.0.0.1:8080/function/f", True),
    ("0.0.0.0", "http://10.255.255.254:8080/function/f", False),
)


def test_functions_of_this_gateway_can_be_called_back() -> None:
    wrong = []
    for listens, url, taken in CALLED_BACK:
        found = outcome(CallbackRule(own=(listens, 8080)).target, url)
        if isinstance(found, BadRequest) == taken:
            wrong.append((listens, url, found))
    assert wrong == []


def test_localhost_is_this_gateway_at_the_address_where_it_listens() -> None:
    url = "http://localhost:8080/function/f?x"
    assert str(CallbackRule(own=("127.0.0.1", 8080)).target(url)) == url.replace(
        "localhost", "127.0.0.1"
    )
    assert str(CallbackRule(own=("::1", 8080)).target(url)) == url.replace("localhost", "[::1]")


@pytest.mark.parametrize("allowed", [(), ("127.0.0.0/8",)])
def test_function_of_this_gateway_is_known_by_each_of_its_names(allowed: tuple[str, ...]) -> None:
    rule = CallbackRule(allowed=allowed, own=("127.0.0.1", 8080))
    for url, calls in {
        "http://localhost:8080/function/f": True,
        "http://127.0.0.1:8080/function/f?x": True,
        "http://localhost:8080/async-function/f": False,
        "http://127.0.0.1:8081/function/f": False,
        "http://gateway:8080/function/f": False,
    }.items():
        assert rule.calls_function(URL(url)) is calls, url


def test_callbacks_to_one_host_and_port_share_a_lane() -> None:
    assert callback_lane("http://There/a") == callback_lane("http://there:80/b")
    assert callback_lane("http://there/") != callback_lane("https://there/")


def test_functions_of_this_machine_have_lanes_of_their_own() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        url = f"http://{host}:8080"
        assert callback_lane(f"{url}/function/a/x") == callback_lane(f"{url}/function/a?y")
        assert callback_lane(f"{url}/function/a") != callback_lane(f"{url}/function/b")
        assert callback_lane(f"{url}/function/") == callback_lane(f"{url}/other/b")
    there = "http://there:8080/function"
    assert callback_lane(f"{there}/a") == callback_lane(f"{there}/b"), "others' hosts have one"


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


async def test_name_leads_to_its_permitted_addresses_only() -> None:
    async def addresses(rule: CallbackRule, host: str, *found: str) -> list[str]:
        resolved = await PermittedResolver(_Resolver(*found), rule).resolve(host, 8080)
        return [one["host"] for one in resolved]

    assert await addresses(PUBLIC, "x", "1.1.1.1") == ["1.1.1.1"]
    assert await addresses(PUBLIC, "x", "1.1.1.1", "10.0.0.1") == ["1.1.1.1"]
    assert await addresses(ALLOWED, "x", "10.1.0.1", "10.0.0.1") == ["10.1.0.1"]
    for host in ("gateway.openfaas", "Receiver"):
        assert await addresses(ALLOWED, host, "10.0.0.1") == ["10.0.0.1"]
        with pytest.raises(NotPublic):
            await addresses(PUBLIC, host, "10.0.0.1")
