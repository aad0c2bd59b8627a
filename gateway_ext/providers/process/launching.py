"""Starting a process through the launcher: in a session of its own, with its orders in memory."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import gateway_ext.runtime
from gateway_ext.providers.process.settings import ProcessSettings

RUNTIME = Path(gateway_ext.runtime.__file__).parent
_LAUNCHER = Path(__file__).with_name("launch.py")
# Every process that descends from one of ours says so, wherever it ended up.
MARK = "GPUFAAS_INSTANCE"


@dataclass(frozen=True, slots=True)
class Orders:
    """What is to run, as whom, and what it may reach; `uid` None is whoever the gateway is."""

    command: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    uid: int | None = None
    cpus: Sequence[int] = ()
    secrets: str = ""
    visible: Sequence[str] = ()


class Started(NamedTuple):
    """A process, and the end of the pipe that it writes into."""

    process: subprocess.Popen[bytes]
    output: int


def launch(orders: Orders, pass_on: Sequence[int] = ()) -> Started:
    """Start it; it dies with this thread."""
    said = os.memfd_create("orders")
    output, written = os.pipe()
    try:
        os.write(said, json.dumps(asdict(orders) | {"parent": os.getpid()}).encode())
        os.lseek(said, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LAUNCHER)],
            stdin=said,
            stdout=written,
            stderr=written,
            pass_fds=pass_on,
            start_new_session=True,
            cwd="/",
            env={"LANG": "C.UTF-8"},
        )
    except BaseException:
        os.close(output)
        raise
    finally:
        os.close(said)
        os.close(written)
    return Started(process, output)


def users_refused(uid: int, settings: ProcessSettings) -> str:
    """Why nothing can be run as this user; empty where it can."""
    python = settings.base_python
    command = [str(python), "-I", "-S", "-c", ""]
    visible = interpreter_folders(python)
    started = launch(Orders(command, {"LANG": "C.UTF-8"}, "/", uid, visible=visible))
    with os.fdopen(started.output, "rb") as output:
        said = output.read().decode(errors="replace").strip()
    status = started.process.wait()
    return "" if status == 0 else f"{said.rpartition(chr(10))[2]} ({status})"


def interpreter_folders(python: Path) -> list[str]:
    """What a user without rights needs to see in order to run it, and our runtime in it."""
    folders = {
        sys.base_prefix,
        sys.prefix,
        str(RUNTIME),
        str(Path(os.path.realpath(python)).parents[1]),
    }
    return sorted(folders)
