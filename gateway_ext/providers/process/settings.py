"""What a person can choose about the process provider: one frozen value."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Where functions come from, and how they live.

    A deployment may name folders inside `roots` only. Where the gateway is root, every function
    gets a user id of its own out of `uids` from `first_uid` on; `visible` are further folders that
    those users must reach although a folder above is closed to them. `pip_environment` is what pip
    needs to find packages: indexes, proxies, certificates.
    """

    state: Path
    builds: Path = Path("build")
    roots: tuple[Path, ...] = (Path(),)
    base_python: Path = field(default_factory=lambda: Path(sys.executable))
    first_uid: int = 50_000
    uids: int = 10_000
    visible: tuple[Path, ...] = ()
    pip_environment: Mapping[str, str] = field(default_factory=dict)
    log_bytes: int = 2 << 20
    start_timeout_s: float = 600.0
    drain_s: float = 30.0
    stop_s: float = 30.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 60.0
