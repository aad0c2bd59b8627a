"""Addresses of HTTP servers, as people write them."""

import pytest

from common.addresses import address_text, host_and_port
from common.errors import BadAddress


@pytest.mark.parametrize(
    ("text", "found"),
    [("127.0.0.1:8080", ("127.0.0.1", 8080)), ("[::1]:0", ("::1", 0)), (":80", ("0.0.0.0", 80))],
)
def test_host_and_port_are_parsed_when_the_address_is_of_either_family(
    text: str, found: tuple[str, int]
) -> None:
    assert host_and_port(text) == found


@pytest.mark.parametrize("text", ["", "8080", "host:", "host:http", "host:70000", "host:²"])
def test_address_is_refused_when_it_has_no_port(text: str) -> None:
    with pytest.raises(BadAddress, match="HOST:PORT"):
        host_and_port(text)


def test_text_has_brackets_when_the_host_is_an_ipv6_address() -> None:
    assert address_text("::1", 80) == "[::1]:80"
    assert address_text("host", 80) == "host:80"
