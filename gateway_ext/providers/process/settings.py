"""The settings of the process provider: frozen values."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from gateway_ext.errors import BadRequest
from gateway_ext.providers.managed.instance import ManagedSettings


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Bounds on what one build of an environment may use: it runs code of the function's packages.

    `network` is whether it has one. A build's `memory_bytes` are private memory of all its
    processes, its `disk_bytes` all that it leaves on disk, `at_once` builds run at a time, and at
    most half of them (rounded up) for one namespace.
    """

    network: bool = True
    timeout_s: float = 1800.0
    memory_bytes: int = 4 << 30
    disk_bytes: int = 20 << 30
    processes: int = 512
    at_once: int = 4

    def check(self) -> None:
        """BadRequest names the value with which no build could run."""
        for limit in fields(self):
            if limit.name != "network" and getattr(self, limit.name) <= 0:
                raise BadRequest(f"{limit.name} of builds: more than 0 is expected")

    @property
    def at_once_of_one(self) -> int:
        """How many builds of one namespace run at a time."""
        return (self.at_once + 1) // 2


@dataclass(frozen=True, slots=True)
class ProcessProviderSettings(ManagedSettings):
    """Where functions come from, and how they run.

    A deployment may name folders inside `roots` only. If the gateway is root, every function gets
    a user id of its own, one of `uids` ids from `first_uid` on, and every build one of `build_uids`
    from `first_build_uid` on; gateways of one machine agree on them through locks in `user_locks`.
    `visible` are further folders that those users must reach although a folder above is closed to
    them. `pip_environment` has what pip needs to find packages: indexes, proxies, certificates.
    Templates of functions without instances end after `template_idle_s`, and all together take at
    most `template_bytes` of memory; with 0 there are none. With `shows_errors` the callers of a
    function that says nothing about it get the text of its errors.
    """

    state: Path
    builds: Path = Path("build")
    roots: tuple[Path, ...] = (Path(),)
    base_python: Path = field(default_factory=lambda: Path(sys.executable))
    first_uid: int = 50_000
    uids: int = 10_000
    first_build_uid: int = 61_000
    build_uids: int = 900
    user_locks: Path = Path("/run/gpufaas-users.lock")
    visible: tuple[Path, ...] = ()
    pip_environment: Mapping[str, str] = field(default_factory=dict)
    build: BuildLimits = BuildLimits()
    template_idle_s: float = 3600.0
    template_bytes: int = 4 << 30
    shows_errors: bool = False
