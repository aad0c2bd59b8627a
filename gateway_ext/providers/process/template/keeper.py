"""The process that keeps a template and all its forks: their parent, which reports their ends.

It is the launcher program before it gives up its rights, so that no function can signal it or
pretend to be it where the gateway is root.
"""

import asyncio
import os
import signal
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gateway_ext.providers.process.launch import InstanceProcess, LaunchOrders, launch

_REPORT = struct.Struct("=ii")
_AT_ONCE = 512 * _REPORT.size
_PARENT, _SESSION = 1, 3  # positions in /proc/PID/stat after the name
# The keeper of processes that have ended takes note of that, and ends, within milliseconds.
_LAST_REPORT_S = 0.5


class TemplateKeeper:
    """A keeper and the processes that are known of it; it ends when it has no child any more.

    `first` resolves to the process that it was started for; OSError if there is none.
    `ended` resolves once this process has taken note of the keeper's end.
    """

    def __init__(self, orders: LaunchOrders, pass_on: Sequence[int]) -> None:
        """Start the keeper, and the process that the orders describe below it."""
        self._uid = orders.uid
        self._known: dict[int, InstanceProcess] = {}
        self._rest = b""
        self.first: asyncio.Future[InstanceProcess] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reports, theirs = os.pipe()
        try:
            launched = launch(replace(orders, reports=theirs), [*pass_on, theirs])
        except BaseException:
            os.close(self._reports)
            raise
        finally:
            os.close(theirs)
        self._process = launched.process
        self._output = launched.output
        os.set_blocking(self._reports, False)
        asyncio.get_running_loop().add_reader(self._reports, self._read)

    def take(self, pid: int, output: int) -> InstanceProcess:
        """A child of the keeper; ProcessLookupError unless it is one, and nobody has it yet.

        Its end is still to be reported: the keeper reports it after the child is gone from /proc.
        """
        if pid in self._known or not self._is_child(pid):
            raise ProcessLookupError(f"{pid} is no new process of this template")
        process = self._known[pid] = InstanceProcess(pid, output)
        if not self._is_child(pid):
            del self._known[pid]
            process.ended(0)
            raise ProcessLookupError(f"{pid} has ended")
        return process

    def end(self) -> None:
        """Kill the keeper, and with it all its children."""
        if self._process.poll() is None:
            self._process.kill()

    async def close(self) -> None:
        """Return when it has ended; kill it if it keeps a process that nobody ends."""
        await asyncio.wait([self.ended], timeout=_LAST_REPORT_S)
        self.end()
        await asyncio.shield(self.ended)

    def _is_child(self, pid: int) -> bool:
        """Whether this is a living child of the keeper, of its user, that leads a session."""
        folder = Path("/proc", str(pid))
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            owner = folder.stat().st_uid
        except OSError:
            return False
        ours = int(fields[_PARENT]) == self._process.pid and int(fields[_SESSION]) == pid
        return ours and self._uid in (None, owner)

    def _read(self) -> None:
        try:
            part = os.read(self._reports, _AT_ONCE)
        except BlockingIOError:
            return
        if not part:
            self._close()
            return
        data = self._rest + part
        whole = len(data) - len(data) % _REPORT.size
        self._rest = data[whole:]
        for pid, status in _REPORT.iter_unpack(data[:whole]):
            self._note(pid, status)

    def _note(self, pid: int, status: int) -> None:
        if not self.first.done():
            self._note_first(pid)
            return
        process = self._known.pop(pid, None)
        if process is not None:
            process.ended(os.waitstatus_to_exitcode(status))

    def _note_first(self, pid: int) -> None:
        try:
            self._known[pid] = InstanceProcess(pid, self._output)
        except OSError as error:  # it has ended, or no descriptor is left
            os.close(self._output)
            self.first.set_exception(error)
        else:
            self.first.set_result(self._known[pid])

    def _close(self) -> None:
        """The keeper has ended, and with it what is left of its children."""
        asyncio.get_running_loop().remove_reader(self._reports)
        os.close(self._reports)
        self._process.wait()
        if not self.first.done():
            os.close(self._output)
            self.first.set_exception(ProcessLookupError("it could not be started"))
            self.first.exception()  # whoever waited for it may have been cancelled
        for process in self._known.values():
            process.ended(-signal.SIGKILL)
        self._known.clear()
        self.ended.set_result(None)
