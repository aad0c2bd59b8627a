"""Orders that another site's page has a browser give are refused; those of programs are not."""

import pytest

from gateway_ext.errors import CrossSite, WrongHost
from gateway_ext.sites import AnsweredHosts, HostNames, refuse_other_sites

HOST = (b"host", b"gpus.example:8080")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"origin", b"http://gpus.example:8080")],
        [(b"sec-fetch-site", b"same-origin"), (b"origin", b"https://gpus.example:8080")],
        [(b"x-forwarded-proto", b"https, http"), (b"origin", b"https://gpus.example:8080")],
        [(b"sec-fetch-site", b"none")],
    ],
)
def test_programs_and_our_own_page_may(headers: list[tuple[bytes, bytes]]) -> None:
    refuse_other_sites([HOST, *headers])


@pytest.mark.parametrize(
    "headers",
    [
        [(b"origin", b"http://evil.example")],
        [(b"origin", b"null")],
        [(b"origin", b"http://[")],
        [(b"origin", b"http://gpus.example:8081")],
        [(b"origin", b"https://gpus.example:8080")],
        [(b"origin", b"http://gpus.example:8080"), (b"x-forwarded-proto", b"https")],
        [(b"origin", b"http://evil.example"), (b"origin", b"http://gpus.example:8080")],
        [(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-site", b"same-origin")],
        [(b"sec-fetch-site", b"cross-site")],
        [(b"sec-fetch-site", b"same-site"), (b"origin", b"http://gpus.example:8080")],
    ],
)
def test_other_sites_may_not(headers: list[tuple[bytes, bytes]]) -> None:
    for reading in (True, False):
        with pytest.raises(CrossSite):
            refuse_other_sites([HOST, *headers], reading=reading)


def test_another_sites_link_may_lead_here_but_neither_its_form_nor_its_frame() -> None:
    followed = [HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")]
    link, frame = (b"sec-fetch-dest", b"document"), (b"sec-fetch-dest", b"iframe")
    refuse_other_sites([*followed, link], reading=True)
    for headers, reading in (([*followed, link], False), ([*followed, frame], True)):
        with pytest.raises(CrossSite):
            refuse_other_sites(headers, reading=reading)


def test_sandboxed_page_is_another_site_although_it_is_of_this_host() -> None:
    with pytest.raises(CrossSite):
        refuse_other_sites([HOST, (b"sec-fetch-site", b"same-origin"), (b"origin", b"null")])
    with pytest.raises(CrossSite):
        refuse_other_sites([(b"origin", b"null")])


def answered(address: str, hosts: list[bytes], *listed: str, functions: str = "") -> list[bytes]:
    """Those of the hosts in whose names a gateway at this address answers."""
    own = AnsweredHosts(address, HostNames(listed), HostNames([functions] if functions else []))

    def is_answered(host: bytes) -> bool:
        try:
            own.check(host)
        except WrongHost:
            return False
        return True

    return [host for host in hosts if is_answered(host)]


LOOPBACK = [
    b"",
    b"localhost",
    b"LOCALHOST:8080",
    b"127.0.0.1",
    b"127.1:80",
    b"[::1]:8080",
    b"[::1]",
]
NAMED = [b"evil.example", b"127.0.0.1.evil.example:80", b"localhost.evil.example", b"localhost:x"]
ADDRESSES = [b"10.0.0.7:8080", b"[fe80::1]"]


@pytest.mark.parametrize("address", ["127.0.0.1:8080", "[::1]:8080", "127.9.9.9:1"])
def test_only_own_names_are_answered_when_a_gateway_listens_on_loopback(address: str) -> None:
    hosts = [*LOOPBACK, *NAMED, *ADDRESSES]
    assert answered(address, hosts) == LOOPBACK
    assert answered(address, hosts, "evil.example") == [*LOOPBACK, b"evil.example"]
    assert answered(address, hosts, functions="evil.example") == [*LOOPBACK, b"evil.example"]
    assert answered(address, hosts, functions="*") == LOOPBACK
    assert answered(address, hosts, "*") == hosts


def test_every_name_is_answered_elsewhere_unless_some_are_listed() -> None:
    hosts = [b"", b"localhost:1", b"127.0.0.1", *NAMED, *ADDRESSES, b"gpus.example"]
    for functions in ("", "functions.example"):
        assert answered("0.0.0.0:8080", hosts, functions=functions) == hosts
    named = [b"", b"localhost:1", b"127.0.0.1", *ADDRESSES, b"gpus.example"]
    assert answered("[::]:8080", hosts, "gpus.example") == named
