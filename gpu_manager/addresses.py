"""Where a GPU manager listens: `unix:/path`, `unix:@name` (abstract) or `tcp:host:port`."""

from dataclasses import dataclass
from pathlib import Path

from gpu_manager.errors import BadSetting

_PORTS = range(65536)


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
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """The address that a person wrote; BadSetting says what is wrong with it."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and len(rest) > 1 and rest[0] in "@/":
        return UnixAddress(rest)
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if host and port.isdecimal() and int(port) in _PORTS:
            return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise BadSetting("address", text, "unix:/path, unix:@name or tcp:host:port is wanted")
