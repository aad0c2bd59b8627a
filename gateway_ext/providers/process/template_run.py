"""The processes of a template: its keeper, and the run of one from its start to its end."""

import asyncio
import contextlib
import os
import secrets
import signal
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from common.liveness import LivenessTimes, until_frozen
from gateway_ext.providers.managed.logs import FunctionLog, OutputPipe
from gateway_ext.providers.process import processes
from gateway_ext.providers.process.launch import MARK, InstanceProcess, LaunchOrders, launch
from gateway_ext.runtime.template.fork_line import VARIABLE, ForkReport, OrderLine, TemplateBroken

_REPORT = struct.Struct("=ii")
_AT_ONCE = 512 * _REPORT.size
_PARENT, _SESSION = 1, 3  # positions in /proc/PID/stat after the name
# The keeper of processes that have ended takes note of that, and ends, within milliseconds.
_LAST_REPORT_S = 0.5
_LIVENESS = LivenessTimes(look_s=0.75)
_KEEPER_S = 60.0
_FORK_S = 10.0
_NOTICE_S = 1.0  # between the end of a process and that of its line
_DRAIN_OUTPUT_S = 0.5


class TemplateKeeper:
    """The process that keeps a template and all its forks: their parent, which reports their ends.

    It is the launcher program before it gives up its rights, so that no function can signal it or
    pretend to be it where the gateway is root. It ends when it has no child any more.
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
            stat = (folder / "stat").read_bytes()  # a process chooses its name: it may be no text
            fields = stat.rpartition(b")")[2].split()
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


class ProcessPlace(NamedTuple):
    """What the processes of a function share, its templates and its instances."""

    function: str
    log: FunctionLog
    mark: str  # of the processes of this gateway
    leaders: set[int]  # of all sessions that run
    changed: Callable[[], None]  # called when an instance takes no more calls, or a template warms
    sockets: Path
    memory_bytes: int | None  # the most of an instance
    timeout_s: float  # of a call


@dataclass(eq=False)
class TemplateRun:
    """A template process; `idle` from its first report on. Whoever has one ends it by `end`."""

    name: str
    process: InstanceProcess
    keeper: TemplateKeeper
    line: OrderLine
    place: ProcessPlace

    def __post_init__(self) -> None:
        self.forking, self.forked = 0, 0  # orders that are under way, and those before
        self.place.leaders.add(self.process.pid)
        self._living = asyncio.create_task(live(self.process, self.name, self.place))
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, orders: LaunchOrders, place: ProcessPlace, keepers: set[TemplateKeeper]
    ) -> Self:
        """Start the first template of a keeper; TemplateBroken if that fails.

        The keeper is in `keepers` until it has ended, which may be long after the template's end.
        """
        name = new_name(place)
        line = OrderLine()
        with line.theirs as theirs:
            own = {VARIABLE: str(theirs.fileno()), **named(name, place)}
            complete = replace(orders, environment={**orders.environment, **own})
            try:
                keeper = TemplateKeeper(complete, [theirs.fileno()])
            except OSError as error:
                line.close()
                raise TemplateBroken(f"cannot be started: {error}") from error
        keepers.add(keeper)
        keeper.ended.add_done_callback(lambda _: keepers.remove(keeper))
        try:
            process = await asyncio.wait_for(asyncio.shield(keeper.first), _KEEPER_S)
        except BaseException as error:  # a caller that is cancelled leaves no process behind
            line.close()
            keeper.end()
            keeper.first.add_done_callback(_close_output)
            if isinstance(error, OSError | TimeoutError):
                raise TemplateBroken(f"cannot be started: {error!r}") from error
            raise
        return cls(name, process, keeper, line, place)

    async def report(self, *expected: str, within_s: float) -> ForkReport:
        """The template's next report; TemplateBroken unless it is one of those expected."""
        try:
            report = await _report(self.line, *expected, within_s=within_s)
        except TimeoutError as error:
            raise TemplateBroken(f"did not report within {within_s:g} s") from error
        if report.pid != self.process.pid:
            raise TemplateBroken("sent a report that nobody expects")
        return report

    async def fork(self, name: str, listener: int) -> InstanceProcess:
        """An instance of this name that serves this socket; TemplateBroken if it does not come."""
        process, line = await self._forked("serve", name, [listener])
        line.close()
        return process

    async def fork_run(self, kind: Literal["warm", "spare"]) -> "TemplateRun":
        """A fork below the same keeper.

        One to `warm` is another template, which makes its example calls now. A `spare` waits for
        the order to be an instance, and makes no other process.
        """
        name = new_name(self.place)
        process, line = await self._forked(kind, name, [])
        return TemplateRun(name, process, self.keeper, line, self.place)

    def watch(self, ended: Callable[[Self, str], None]) -> None:
        """Call this with the reason once it ends, freezes, or speaks without being asked."""
        self._watching = asyncio.create_task(self._watch(ended))

    async def _watch(self, ended: Callable[[Self, str], None]) -> None:
        ended(self, await self._unasked_end())

    async def _unasked_end(self) -> str:
        spoken = asyncio.create_task(_readable(self.line))
        frozen = asyncio.create_task(until_frozen(self.process.pid, None, _LIVENESS))
        waits: set[asyncio.Future[Any]] = {spoken, frozen, self.process.exited}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if frozen.done():
                return frozen.result()
            # It closes its line, too, before it says that it becomes the instance that is ordered.
            within_s = _FORK_S if self.forking else _NOTICE_S
            ended = await asyncio.wait({self.process.exited}, timeout=within_s)
            return "ended" if ended[0] else "broke its line"
        finally:
            spoken.cancel()
            frozen.cancel()
            await asyncio.gather(spoken, frozen, return_exceptions=True)

    async def end(self) -> None:
        """Kill it, and return when nothing but its forks is left of it."""
        await self._close_line()
        if not self.process.exited.done():
            processes.kill_session(self.process.pid)
            self.process.send_signal(signal.SIGKILL)
        await asyncio.shield(self._living)

    async def release(self) -> None:
        """Give the process away, which has become an instance itself."""
        self._living.cancel()
        await self._close_line()

    async def _close_line(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])  # it reads the line
        self.line.close()

    async def _forked(
        self, kind: str, name: str, descriptors: list[int]
    ) -> tuple[InstanceProcess, OrderLine]:
        with contextlib.ExitStack() as unless_begun:
            output, written = os.pipe()
            unless_begun.callback(os.close, output)
            try:
                line = self.line.order(kind, name, named(name, self.place), [written, *descriptors])
            finally:
                os.close(written)
            unless_begun.enter_context(line)
            self.forking += 1
            try:
                process = await self._began(line, output)
            finally:
                self.forking -= 1
                self.forked += 1
            unless_begun.pop_all()
        line.confirm()
        return process, line

    async def _began(self, line: OrderLine, output: int) -> InstanceProcess:
        try:
            report = await _report(line, "began", within_s=_FORK_S)
            return self._new_process(report.pid, output)
        except OSError as error:
            why = "it took too long" if isinstance(error, TimeoutError) else str(error)
            raise TemplateBroken(f"did not fork: {why}") from error

    def _new_process(self, pid: int, output: int) -> InstanceProcess:
        """The process that has begun: a fork, or this one, if it cannot be forked."""
        if pid != self.process.pid:
            return self.keeper.take(pid, output)
        self.process.output = output
        return self.process


async def live(process: InstanceProcess, name: str, place: ProcessPlace) -> None:
    """Store the process's output until it has ended; then kill what it has started."""
    pipe = OutputPipe(process.output, lambda lines: place.log.write(name, *lines))
    try:
        await asyncio.shield(process.exited)
        place.leaders.discard(process.pid)
        await asyncio.to_thread(processes.end_marked, mark_of(name, place))
        with contextlib.suppress(TimeoutError):  # a process without the mark holds the pipe
            await asyncio.wait_for(pipe.ended, _DRAIN_OUTPUT_S)
    finally:
        pipe.close()


async def _report(line: OrderLine, *expected: str, within_s: float) -> ForkReport:
    await asyncio.wait_for(_readable(line), within_s)
    return line.received(*expected)


async def _readable(line: OrderLine) -> None:
    """Return when anything comes, the end of the line included."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(line.socket, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(line.socket)


def _close_output(first: asyncio.Future[InstanceProcess]) -> None:
    if first.exception() is None:
        os.close(first.result().output)


def new_name(place: ProcessPlace) -> str:
    """A name of a process of the function; all of them have the same length."""
    return f"{place.function}-{secrets.token_hex(4)}"


def mark_of(name: str, place: ProcessPlace) -> str:
    """The value of the variable by which its descendants are found."""
    return f"{place.mark}/{name}"


def named(name: str, place: ProcessPlace) -> dict[str, str]:
    return {"HOSTNAME": name, MARK: mark_of(name, place)}
