"""The process of an instance, however it came to be: its id, its output, its end."""

import asyncio
import os
import signal
from contextlib import suppress
from typing import Protocol

from gateway_ext.providers.process.launch import LaunchedProcess


class InstanceProcess(Protocol):
    """A process that leads a session, until it has ended."""

    is_warm: bool  # began with what a template's example calls had traced

    @property
    def pid(self) -> int:
        """Its id, and that of its session."""

    @property
    def output(self) -> int:
        """The reading end of the pipe that it writes to, which the caller closes."""

    @property
    def exited(self) -> asyncio.Future[int]:
        """Resolves to its exit status once it has ended: negative if a signal ended it."""

    @property
    def gone(self) -> asyncio.Future[None]:
        """Resolves as soon as it has ended; how it ended may be known a little later."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""


class StartedProcess:
    """A child of this process."""

    def __init__(self, launched: LaunchedProcess) -> None:
        """Kill it, and raise OSError, if no descriptor is left by which to notice its end."""
        self._process = launched.process
        self.is_warm = False
        self.output = launched.output
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            os.close(self.output)
            self._process.kill()
            self._process.wait()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._handle_exit)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: int) -> None:
        if not self.exited.done():
            self._process.send_signal(number)

    def _handle_exit(self) -> None:
        status = self._process.poll()
        if status is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.gone.set_result(None)
        self.exited.set_result(status)


class KeptProcess:
    """A child of a keeper, which reports its end."""

    def __init__(self, pid: int, output: int) -> None:
        """ProcessLookupError if it has ended and its keeper has taken note of that."""
        self.pid = pid
        self.is_warm = False
        self.output = output
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_end)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended: its id may be another's by then."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def ended(self, status: int) -> None:
        if self._pidfd >= 0:
            self._note_end()
            os.close(self._pidfd)
            self._pidfd = -1
        if not self.exited.done():
            self.exited.set_result(status)

    def _note_end(self) -> None:
        if not self.gone.done():
            asyncio.get_running_loop().remove_reader(self._pidfd)
            self.gone.set_result(None)
