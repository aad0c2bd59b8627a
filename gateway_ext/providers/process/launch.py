"""Processes of instances: started through the launcher program, in a session each; their ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import gateway_ext.runtime

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


class InstanceProcess:
    """A process that leads a session, until it has ended; a keeper's child if it is none of ours.

    `gone` resolves as soon as it has ended, `exited`, perhaps a little later, to its status, which
    is negative if a signal ended it.
    """

    def __init__(self, pid: int, output: int, ours: subprocess.Popen[bytes] | None = None) -> None:
        """ProcessLookupError if it has ended and its parent has taken note of that."""
        self.pid = pid
        self.output = output  # the reading end of a pipe, which the caller closes
        self.is_warm = False  # whether it began with what a template's example calls had traced
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ours = ours
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_end)

    @classmethod
    def started(cls, launched: LaunchedProcess) -> Self:
        """Kill it, and raise OSError, if no descriptor is left by which to notice its end."""
        process, output = launched
        try:
            return cls(process.pid, output, process)
        except OSError:
            os.close(output)
            process.kill()
            process.wait()
            raise

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended: its id may be another's by then."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def ended(self, status: int) -> None:
        """Its parent has taken note of its end."""
        if self._pidfd >= 0:
            self._leave()
            os.close(self._pidfd)
            self._pidfd = -1
        if not self.exited.done():
            self.exited.set_result(status)

    def _note_end(self) -> None:
        if self._ours is None:
            self._leave()
        elif (status := self._ours.poll()) is not None:
            self.ended(status)

    def _leave(self) -> None:
        if not self.gone.done():
            asyncio.get_running_loop().remove_reader(self._pidfd)
            self.gone.set_result(None)


def users_refused(uid: int, python: Path) -> str:
    """Why no process can be run as this user; empty if one can."""
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
