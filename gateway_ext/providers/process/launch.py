"""Starts processes through the launcher program: in a session each, with orders in memory."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import gateway_ext.runtime
from gateway_ext.providers.process.settings import ProcessProviderSettings

RUNTIME = Path(gateway_ext.runtime.__file__).parent
_LAUNCHER = Path(__file__).with_name("launcher_program.py")
# A variable in the environment of every process that descends from an instance.
MARK = "GPUFAAS_INSTANCE"


@dataclass(frozen=True, slots=True)
class LaunchOrders:
    """The command to run, its user and what it may reach; `uid` None means the gateway's user.

    `scratch` is a folder that takes the place of /tmp and /var/tmp. `limits` are named as in
    `resource`. With `background` others get the processors first. With `reports`, a descriptor that
    is passed on, the started process keeps the command and all that it forks, and writes there how
    they end.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    uid: int | None = None
    cpus: Sequence[int] = ()
    secrets: str = ""
    visible: Sequence[str] = ()
    scratch: str = ""
    network: bool = True
    background: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)
    reports: int = -1


class LaunchedProcess(NamedTuple):
    """A process, and the reading end of the pipe that it writes to."""

    process: subprocess.Popen[bytes]
    output: int


def launch(orders: LaunchOrders, pass_on: Sequence[int] = ()) -> LaunchedProcess:
    """Start a process, which is killed when this thread ends."""
    given = os.memfd_create("orders")
    output, written = os.pipe()
    try:
        os.write(given, json.dumps(asdict(orders) | {"parent": os.getpid()}).encode())
        os.lseek(given, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LAUNCHER)],
            stdin=given,
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
        os.close(given)
        os.close(written)
    return LaunchedProcess(process, output)


def users_refused(uid: int, settings: ProcessProviderSettings) -> str:
    """Why no process can be run as this user; empty if one can."""
    python = settings.base_python
    command = [str(python), "-I", "-S", "-c", ""]
    visible = interpreter_folders(python)
    started = launch(LaunchOrders(command, {"LANG": "C.UTF-8"}, "/", uid, visible=visible))
    with os.fdopen(started.output, "rb") as output:
        text = output.read().decode(errors="replace").strip()
    status = started.process.wait()
    return "" if status == 0 else f"{text.rpartition(chr(10))[2]} ({status})"


def interpreter_folders(python: Path) -> list[str]:
    """Folders that a user without rights must reach to run our runtime in this Python."""
    folders = {
        sys.base_prefix,
        sys.prefix,
        str(RUNTIME),
        str(Path(os.path.realpath(python)).parents[1]),
    }
    return sorted(folders)
