"""Where a GPU manager is: `unix:/path`, `unix:@name` (abstract), `tcp:host:port`, `tls:host:port`.

A `tls` address that functions are told ends in `#` and the fingerprint of the certificate that they
will be shown there.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from gpu_manager.errors import BadSetting

_PORTS = range(65536)
_FINGERPRINT = re.compile(r"([0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket file, or a name of the kernel's own (abstract) that no file stands for."""

    name: str

    @property
    def abstract(self) -> bool:
        """No file: the name is free as soon as its process is gone."""
        return self.name.startswith("@")

    @property
    def path(self) -> Path:
        """The socket file."""
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
        return f"tcp:{_site(self.host, self.port)}"


@dataclass(frozen=True, slots=True)
class TlsAddress:
    """The same, spoken to in TLS; the fingerprint names the certificate that is shown."""

    host: str
    port: int
    fingerprint: str = ""

    def __str__(self) -> str:
        shown = f"#{self.fingerprint}" if self.fingerprint else ""
        return f"tls:{_site(self.host, self.port)}{shown}"


Address = UnixAddress | TcpAddress | TlsAddress


def parse_address(text: str) -> Address:
    """The address that a person wrote; BadSetting says what is wrong with it."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and len(rest) > 1 and rest[0] in "@/":
        return UnixAddress(rest)
    site, _, fingerprint = rest.partition("#")
    host, _, port = site.rpartition(":")
    if host and port.isdecimal() and int(port) in _PORTS:
        host = host.removeprefix("[").removesuffix("]")
        if scheme == "tcp" and not fingerprint:
            return TcpAddress(host, int(port))
        if scheme == "tls" and _FINGERPRINT.fullmatch(fingerprint.lower()):
            return TlsAddress(host, int(port), fingerprint.lower())
    wanted = "unix:/path, unix:@name, tcp:host:port or tls:host:port is wanted"
    raise BadSetting("address", text, wanted)


def _site(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
