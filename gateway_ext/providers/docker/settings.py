"""The settings of the docker provider: one frozen value."""

import re
from dataclasses import dataclass
from pathlib import Path

from gateway_ext.errors import BadRequest
from gateway_ext.providers.managed.instance import ManagedSettings

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,30}")
_PULLS = frozenset({"missing", "always", "never"})


@dataclass(frozen=True, slots=True)
class DockerSettings(ManagedSettings):
    """Which Engine to use, and how functions run there.

    Everything that belongs to this gateway on the Engine is labelled with `name`. `gpu_mount` is
    the folder of the Engine's machine, or the volume, that is mounted where GPU functions look for
    the socket of their GPU manager; empty means the folder of the socket's own path.
    """

    state: Path
    url: str = "unix:///var/run/docker.sock"
    tls: Path | None = None
    name: str = "gpufaas"
    network: str = "gpufaas-functions"
    gpu_mount: str = ""
    pull: str = "missing"
    pull_answer_s: float = 15.0
    pull_quiet_s: float = 600.0
    registries: Path | None = None
    port: int = 8080

    def check(self) -> None:
        """BadRequest names the value that is not allowed."""
        if not _NAME.fullmatch(self.name):
            raise BadRequest(f"docker_name: {self.name!r}: letters, digits, `_`, `.`, `-` (31)")
        if not _NAME.fullmatch(self.network):
            raise BadRequest(f"docker_network: {self.network!r} is no name of a network")
        if self.pull not in _PULLS:
            raise BadRequest(f"docker_pull: {self.pull!r}: {', '.join(sorted(_PULLS))} is expected")
