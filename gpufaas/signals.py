"""Signals for a program that runs in our place: passed on to it, once each."""

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
# What a terminal sends to every process in its foreground, the program among them.
_FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})


class Signals:
    """Hands signals to the program; before it runs, one that would end it is remembered."""

    def __init__(self) -> None:
        self.pending: signal.Signals | None = None
        self._program: asyncio.subprocess.Process | None = None

    def program(self, program: asyncio.subprocess.Process) -> None:
        """From now on this is who gets them."""
        self._program = program

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _FORWARDED:
            loop.add_signal_handler(number, self._came, number)
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

    def _came(self, number: signal.Signals) -> None:
        if self._program is None:
            if number not in _HARMLESS:
                self.pending = number
        elif not (number in _FROM_TERMINAL and _in_foreground()):
            _send(self._program, number)


def _send(program: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        program.send_signal(number)
    except ProcessLookupError:
        return  # it has just ended


def _in_foreground() -> bool:
    """Whether a terminal has us in its foreground: then it has told the program itself."""
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
