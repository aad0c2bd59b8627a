"""Addresses: the three forms, and one clear refusal for everything else."""

import pytest

from common.addresses import TcpAddress, TlsAddress, UnixAddress, parse_address
from common.errors import BadAddress
from tests.kit.outcomes import instead_of


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/gpufaas/node.sock", UnixAddress("/run/gpufaas/node.sock")),
        ("unix:@gpufaas", UnixAddress("@gpufaas")),
        ("tcp:127.0.0.1:7070", TcpAddress("127.0.0.1", 7070)),
        ("tcp:[::1]:0", TcpAddress("::1", 0)),
        ("tls:[::1]:7443", TlsAddress("::1", 7443)),
        ("tls:gpu-1:7443#" + "ab" * 32, TlsAddress("gpu-1", 7443, "ab" * 32)),
    ],
)
def test_address_reads_as_it_was_written(text: str, address: object) -> None:
    assert parse_address(text) == address
    assert str(parse_address(text)) == text


NO_ADDRESSES = [
    "", "unix:", "unix:@", "unix:relative", "/run/x", "tcp:host", "tcp:host:", "tcp:host:65536",
    "tcp:host:1#" + "ab" * 32, "tls:host:1#ab", "tls:host:1#" + "xy" * 32,
    "tcp:[::1:80", "tcp:::1]:80", "tcp:[]]:80", "tcp::80", "tcp:host:-1", "http:host:80",
]  # fmt: skip


def test_address_is_refused_when_no_server_could_listen_there() -> None:
    wrong = [
        (text, taken)
        for text in NO_ADDRESSES
        if (taken := instead_of(BadAddress, parse_address, text, match="is expected"))
    ]
    assert wrong == []


def test_abstract_name_begins_with_a_zero_byte_when_it_is_bound() -> None:
    assert UnixAddress("@gpufaas").bound == "\0gpufaas"
    assert UnixAddress("/run/gpufaas").bound == "/run/gpufaas"
