"""Programs that we start: they end with us, or with a block, and get our signals; their output."""

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Self

_TIMEOUT_S = 10.0
# The child asks the kernel to kill it when its parent ends, which holds across `exec`. This needs
# no code of ours between fork and exec.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):  # the parent has ended already
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def dies_with_us(command: Sequence[str]) -> tuple[str, ...]:
    """A command line whose process the kernel kills when this process ends."""
    return (sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command)


@asynccontextmanager
async def killed_at_end(child: Process) -> AsyncIterator[Process]:
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def output_of(*command: str) -> str:
    """A program's output; empty if the program is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


_FORWARDED = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)
_HARMLESS = frozenset({signal.SIGWINCH})
# A terminal sends these to every process in its foreground, so to the program as well.
_FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})


class SignalForwarding:
    """Forwards signals within its context; `pending` is a signal that came before the program."""

    def __init__(self) -> None:
        self.pending: signal.Signals | None = None
        self._program: asyncio.subprocess.Process | None = None

    def forward_to(self, program: asyncio.subprocess.Process) -> None:
        self._program = program

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _FORWARDED:
            loop.add_signal_handler(number, self._handle, number)
        return self

    def __exit__(self, *failure: object) -> None:
        loop = asyncio.get_running_loop()
        for number in _FORWARDED:
            loop.remove_signal_handler(number)

    def _handle(self, number: signal.Signals) -> None:
        if self._program is None:
            if number not in _HARMLESS:
                self.pending = number
        elif not (number in _FROM_TERMINAL and _in_foreground()):
            with suppress(ProcessLookupError):  # the program has just ended
                self._program.send_signal(number)


def _in_foreground() -> bool:
    """Whether we are in a terminal's foreground, so that the program got the signal as well."""
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False
