"""What the process provider needs beside the gateway's settings: one frozen value."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway_ext.errors import BadRequest
from gateway_ext.providers.managed.replicas import ManagedSettings
from gateway_ext.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class ProcessBounds(ManagedSettings):
    """Users of functions and builds, and bounds on builds and templates.

    If the gateway is root, every function gets a user id of its own, one of `uids` ids from
    `first_uid` on, and every build one of `build_uids` from `first_build_uid` on; gateways of one
    machine agree on them through locks in `user_locks`. `pip_environment` has what pip needs to
    find packages: indexes, proxies, certificates. Templates of functions without instances end
    after `template_idle_s`.
    """

    first_uid: int = 50_000
    uids: int = 10_000
    first_build_uid: int = 61_000
    build_uids: int = 900
    user_locks: Path = Path("/run/gpufaas-users.lock")
    pip_environment: Mapping[str, str] = field(default_factory=dict)
    build_processes: int = 512
    template_idle_s: float = 3600.0


def check_settings(settings: GatewaySettings) -> None:
    """BadRequest names the value with which no build could run."""
    for name, limit in (
        ("timeout_s", settings.build_timeout_s),
        ("memory_bytes", settings.build_memory_bytes),
        ("disk_bytes", settings.build_disk_bytes),
        ("at_once", settings.builds_at_once),
    ):
        if limit <= 0:
            raise BadRequest(f"{name} of builds: more than 0 is expected")


def base_python(settings: GatewaySettings) -> Path:
    """The interpreter of which environments are made."""
    return Path(settings.base_python or sys.executable)
