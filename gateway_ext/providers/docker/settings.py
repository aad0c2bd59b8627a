"""What a person can choose about the docker provider: one frozen value."""

import re
from dataclasses import dataclass
from pathlib import Path

from gateway_ext.errors import BadRequest

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,30}")
_PULLS = frozenset({"missing", "always", "never"})


@dataclass(frozen=True, slots=True)
class DockerSettings:
    """Which Engine, and how functions live there.

    Everything that belongs to this gateway on the Engine is labelled with `name`. `gpu_mount` is
    what the Engine mounts where GPU functions look for their GPU manager's socket: a folder of the
    Engine's machine, or a volume; empty is the folder in which the socket is named to them.
    """

    state: Path
    url: str = "unix:///var/run/docker.sock"
    tls: Path | None = None
    name: str = "gpufaas"
    network: str = "gpufaas-functions"
    gpu_mount: str = ""
    pull: str = "missing"
    pull_answer_s: float = 15.0
    registries: Path | None = None
    pids: int = 4096
    tmp_bytes: int = 256 << 20
    stop_at_end: bool = False
    port: int = 8080
    log_bytes: int = 2 << 20
    start_timeout_s: float = 600.0
    drain_s: float = 30.0
    stop_s: float = 30.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 60.0

    def check(self) -> None:
        """BadRequest where something of it cannot be."""
        if not _NAME.fullmatch(self.name):
            raise BadRequest(f"docker_name: {self.name!r}: letters, digits, `_`, `.`, `-` (31)")
        if not _NAME.fullmatch(self.network):
            raise BadRequest(f"docker_network: {self.network!r} is no name of a network")
        if self.pull not in _PULLS:
            raise BadRequest(f"docker_pull: {self.pull!r}: {', '.join(sorted(_PULLS))} is wanted")
