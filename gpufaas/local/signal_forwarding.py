"""Forwards our signals to a child program, each signal once."""

import asyncio
import os
import signal
from types import TracebackType
from typing import Self

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
        """Forward signals to this process from now on."""
        self._program = program

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _FORWARDED:
            loop.add_signal_handler(number, self._handle, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _FORWARDED:
            loop.remove_signal_handler(number)

    def _handle(self, number: signal.Signals) -> None:
        if self._program is None:
            if number not in _HARMLESS:
                self.pending = number
        elif not (number in _FROM_TERMINAL and _in_foreground()):
            _send(self._program, number)


def _send(program: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        program.send_signal(number)
    except ProcessLookupError:
        return  # the program has just ended


def _in_foreground() -> bool:
    """Whether we are in a terminal's foreground, so that the program got the signal as well."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
