"""The settings of the process provider: one frozen value."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway_ext.providers.managed.managed_settings import ManagedSettings


@dataclass(frozen=True, slots=True)
class ProcessProviderSettings(ManagedSettings):
    """Where functions come from, and how they run.

    A deployment may name folders inside `roots` only. If the gateway is root, every function gets
    a user id of its own: one of `uids` ids from `first_uid` on. `visible` are further folders that
    those users must reach although a folder above is closed to them. `pip_environment` has what
    pip needs to find packages: indexes, proxies, certificates.
    """

    state: Path
    builds: Path = Path("build")
    roots: tuple[Path, ...] = (Path(),)
    base_python: Path = field(default_factory=lambda: Path(sys.executable))
    first_uid: int = 50_000
    uids: int = 10_000
    visible: tuple[Path, ...] = ()
    pip_environment: Mapping[str, str] = field(default_factory=dict)
