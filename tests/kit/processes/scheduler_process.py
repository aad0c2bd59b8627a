"""`gpufaas scheduler` as a process of its own."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gpufaas.stack.held_ports import HeldPort
from scheduler.service.access import ApiRole, token
from tests.kit.processes.stopped_process import stop
from tests.kit.worlds.waiting_caller import WaitingCaller

SECRET = b"a secret of processes in the tests"


@dataclass(slots=True)
class SchedulerProcess:
    """One scheduler process, and where it answers."""

    process: Process
    url: str
    secret_file: Path

    async def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """As an init system does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()

    def freeze(self) -> None:
        """As a machine does that is paused: connections stay, answers do not come."""
        stop(self.process.pid)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def client(self, *others: str) -> WaitingCaller:
        """A client of it, and of others."""
        return WaitingCaller([self.url, *others], token(SECRET, ApiRole.CALLER))


@asynccontextmanager
async def scheduler_process(
    folder: Path, *options: str, port: int = 0
) -> AsyncIterator[SchedulerProcess]:
    """A scheduler with these options that answers; it is gone at the end."""
    secret_file = folder / "secret"
    if not secret_file.exists():
        secret_file.touch(mode=0o600)
        secret_file.write_bytes(SECRET)
    url = f"http://127.0.0.1:{port or HeldPort().keep()}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpufaas", "scheduler", "--listen", url.partition("//")[2]),
        *("--secret-file", str(secret_file), *options),
        cwd=folder,
        stderr=PIPE,
    )
    try:
        await _answers(process)
        yield SchedulerProcess(process, url, secret_file)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _answers(process: Process) -> None:
    """Once it says so."""
    assert process.stderr is not None
    said = b""
    while b" answers at " not in said:
        line = await process.stderr.readline()
        assert line, f"it ended: {said.decode()}"
        said += line
    # Whatever it says later has room in the pipe: tests are short.
