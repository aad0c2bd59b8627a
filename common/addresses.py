"""Where a GPU manager is: `unix:/path`, `unix:@name` (abstract), `tcp:host:port`, `tls:host:port`.

A `tls` address that is given to functions ends in `#` and the fingerprint of the certificate that
the manager shows there.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from common.errors import BadAddress
from common.numerals import natural

_PORTS = range(65536)
_PORT_DIGITS = 5
_BRACKETS = {"[", "]"}
_FINGERPRINT = re.compile(r"([0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket file, or an abstract name, which exists in the kernel alone."""

    name: str

    @property
    def abstract(self) -> bool:
        """No file: the name is free as soon as its process is gone."""
        return self.name.startswith("@")

    @property
    def path(self) -> Path:
        assert not self.abstract, f"{self} has no file"
        return Path(self.name)

    @property
    def bound(self) -> str:
        """The name in the form that `socket.bind` and `connect` take."""
        return "\0" + self.name[1:] if self.abstract else self.name

    def __str__(self) -> str:
        return f"unix:{self.name}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host, by name or number, and a port; port 0 lets the system choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{address_text(self.host, self.port)}"


@dataclass(frozen=True, slots=True)
class TlsAddress:
    """A host and a port that speak TLS; the fingerprint is that of the server's certificate."""

    host: str
    port: int
    fingerprint: str = ""

    def __str__(self) -> str:
        shown = f"#{self.fingerprint}" if self.fingerprint else ""
        return f"tls:{address_text(self.host, self.port)}{shown}"


Address = UnixAddress | TcpAddress | TlsAddress


def parse_address(text: str) -> Address:
    """Parse an address; BadAddress explains what is wrong with it."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and len(rest) > 1 and rest[0] in "@/":
        return UnixAddress(rest)
    site, _, fingerprint = rest.partition("#")
    shown, _, port = site.rpartition(":")
    host = shown[1:-1] if shown[:1] == "[" and shown[-1:] == "]" else shown
    if host and not _BRACKETS & set(host) and _is_port(port):
        if scheme == "tcp" and not fingerprint:
            return TcpAddress(host, int(port))
        if scheme == "tls" and _FINGERPRINT.fullmatch(fingerprint.lower()):
            return TlsAddress(host, int(port), fingerprint.lower())
    wanted = "unix:/path, unix:@name, tcp:host:port or tls:host:port is expected"
    raise BadAddress(text, wanted)


def host_and_port(text: str) -> tuple[str, int]:
    """An address to listen on as people write it: `127.0.0.1:80`, `[::1]:80`, `:80` for anywhere.

    BadAddress where it is none.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not _is_port(port):
        raise BadAddress(text, "HOST:PORT is expected")
    return host.strip("[]") or "0.0.0.0", int(port)


def _is_port(text: str) -> bool:
    return (port := natural(text, _PORT_DIGITS)) is not None and port in _PORTS


def address_text(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
