"""The manager's side of the fork server: starts it, requests workers, detects their exit."""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import gpu_manager
from common.liveness import Answers, LivenessTimes, until_frozen
from common.time_limits import time_limit
from gpu_manager.errors import NoWorker
from gpu_manager.frame_stream import FrameStream
from gpu_manager.worker import orders
from torch_shim.errors import BadFrame, ConnectionLost, WireError
from torch_shim.wire.protocol import Frame, FrameKind

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0  # importing torch from a cold disk
_FORK_TIMEOUT_S = 10.0
_MAX_REPORT_BYTES = 64 << 10  # of metadata; a worker's reports have no body
_MOST_DESCRIPTORS = 1  # of a report


class ForkedWorker:
    """A worker process, with its stream of orders and reports, until its exit."""

    def __init__(self, pid: int, pidfd: int, connection: socket.socket) -> None:
        self.name = secrets.token_hex(8)
        self.pid = pid
        self.cause = ""
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self._pidfd = pidfd
        self.stream = FrameStream(connection, _MAX_REPORT_BYTES, 0, _MOST_DESCRIPTORS)
        self._watching: asyncio.Task[None] | None = None
        loop.add_reader(pidfd, self._exit)

    async def send(self, order: orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Send an order; wait while the socket's buffer is full."""
        await self.stream.send(FrameKind.ORDER, order, (), descriptors)

    def send_now(self, order: orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Send an order at once; kill the worker if its socket's buffer is full."""
        if self.exited.done():
            return
        if not self.stream.send_now(FrameKind.ORDER, order, descriptors):
            self.kill("it does not read its orders")

    async def receive(self) -> tuple[orders.WorkerOrder, tuple[int, ...]]:
        """Return the next report, and its descriptors, which the caller closes."""
        frame = await self.stream.read()
        try:
            return orders.read(frame), frame.descriptors
        except BadFrame:
            frame.close_descriptors()
            raise

    def watch(self, times: LivenessTimes, answers: Answers | None = None) -> None:
        """Kill the process as soon as it is frozen, from now on; this ends an earlier watch."""
        if not self.exited.done():
            self._unwatch()
            self._watching = asyncio.get_running_loop().create_task(self._watch(times, answers))

    def kill(self, cause: str) -> None:
        """Kill the process, whatever its state; the first cause given is the one reported."""
        self.cause = self.cause or cause
        if self.exited.done():
            return
        with contextlib.suppress(ProcessLookupError):  # dead, which this loop has not seen yet
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait_for_exit(self, cause: str) -> None:
        """Wait for the exit of a process that has closed its stream; kill it if it is slow."""
        self.stream.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.exited), 0.1)
        except TimeoutError:
            self.kill(cause)
            await self.exited
        self.cause = self.cause or cause

    def close(self) -> None:
        self.stream.close()

    async def _watch(self, times: LivenessTimes, answers: Answers | None) -> None:
        self.kill(f"it {await until_frozen(self.pid, answers, times)}")

    def _unwatch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None  # a cancelled task refers to all that it worked with

    def _exit(self) -> None:
        self._unwatch()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if not self.exited.done():
            self.exited.set_result(None)
        # The last reports are still to be read: their reader closes the stream.


class ForkServer:
    """Creates workers. If the server's process has died, the next fork starts another one."""

    def __init__(
        self,
        *,
        emulated: bool = False,
        pool: Path | None = None,
        liveness: LivenessTimes = LivenessTimes(),  # noqa: B008 - it never changes
    ) -> None:
        """`emulated` means that no worker will use CUDA; `pool` is the library of their pools."""
        self._liveness = liveness
        self._devices = "cpu" if emulated else "cuda"
        self._pool = pool
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: FrameStream | None = None
        self._numbers = itertools.count(1)
        self._asking = asyncio.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the server's process, and wait until it has imported torch."""
        async with self._asking:
            await self._ensure()

    async def fork(self) -> ForkedWorker:
        """Create a new worker; raise NoWorker if that is not possible."""
        # A cancelled fork must not leave its answer unread: the next fork would read it.
        forking = asyncio.ensure_future(self._fork_in_turn())
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_discard)
            raise

    async def close(self) -> None:
        """Kill the server's process; its workers die with it."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # it may be importing torch, for which a fork waits
        async with self._asking:
            await self._stop()

    async def _fork_in_turn(self) -> ForkedWorker:
        async with self._asking:
            for last_try in (False, True):
                try:
                    return await self._fork()
                except (WireError, OSError, TimeoutError) as error:
                    if self._closed:
                        raise NoWorker("any model", "the runtime is closed") from error
                    log.warning("the fork server is lost: %r", error)
                    await self._stop()
                    if last_try:
                        raise NoWorker("any model", f"cannot be forked: {error!r}") from error
        raise AssertionError("unreachable")

    async def _fork(self) -> ForkedWorker:
        stream = await self._ensure()
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        try:
            with theirs:
                await stream.send(FrameKind.ORDER, orders.Fork(number), (), [theirs.fileno()])
            pid, pidfd = read_forked(await self._answer(stream, _FORK_TIMEOUT_S), number)
        except BaseException:
            ours.close()
            raise
        return ForkedWorker(pid, pidfd, ours)

    async def _ensure(self) -> FrameStream:
        if self._closed:
            raise ConnectionLost("the runtime is closed")
        process, stream = self._process, self._stream
        if process is not None and stream is not None and process.poll() is None:
            return stream
        await self._stop()
        ours, theirs = socket.socketpair()
        stream = self._stream = FrameStream(ours, _MAX_REPORT_BYTES, 0)
        with theirs, ExitStack() as stack:
            passed = [theirs.fileno()]
            if self._pool is not None:  # its place is not the server's to see
                passed.append(os.open(self._pool, os.O_RDONLY | os.O_CLOEXEC))
                stack.callback(os.close, passed[-1])
            self._process = self._launch(self._devices, passed)
        frame = await self._answer(stream, _START_TIMEOUT_S)
        frame.close_descriptors()
        ready = orders.read(frame)
        if not isinstance(ready, orders.Ready):
            raise BadFrame(f"{type(ready).__name__} from a fork server that starts")
        for missing in ready.missing:
            log.warning("workers run without this protection: %s", missing)
        return stream

    def _launch(self, devices: str, passed: Sequence[int]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            _command(devices, passed),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,  # the manager handles a Ctrl-C at the terminal
        )

    async def _answer(self, stream: FrameStream, within_s: float) -> Frame:
        """The server's next frame; ConnectionLost if the server freezes meanwhile."""
        assert self._process is not None, "a running server has a process"
        reading = asyncio.ensure_future(stream.read())
        frozen = asyncio.ensure_future(until_frozen(self._process.pid, None, self._liveness))
        try:
            async with time_limit(within_s):
                await asyncio.wait({reading, frozen}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ConnectionLost(f"it {frozen.result()}")
            return reading.result()
        except TimeoutError:
            if reading.done() and not reading.exception():
                reading.result().close_descriptors()  # it came in the same moment
            raise
        finally:
            for task in (reading, frozen):
                task.cancel()
            await asyncio.gather(reading, frozen, return_exceptions=True)

    async def _stop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.get_running_loop().run_in_executor(None, process.wait)


def read_forked(frame: Frame, number: int) -> tuple[int, int]:
    """Return the process id and the pidfd of an answer to this Fork.

    Any other frame is a BadFrame, and its descriptors are closed.
    """
    try:
        answer = orders.read(frame)
        if not isinstance(answer, orders.Forked) or answer.number != number:
            raise BadFrame(f"{type(answer).__name__} as the answer to Fork")
        if len(frame.descriptors) != 1:
            raise BadFrame(f"{len(frame.descriptors)} descriptors of a forked worker")
    except BadFrame:
        frame.close_descriptors()
        raise
    return answer.pid, frame.descriptors[0]


def _discard(forking: "asyncio.Future[ForkedWorker]") -> None:
    """Kill a worker whose request was cancelled."""
    if not forking.cancelled() and forking.exception() is None:
        worker = forking.result()
        worker.kill("its request was cancelled")
        worker.close()


def _command(devices: str, descriptors: Sequence[int]) -> list[str]:
    """Return the fork server's command: `python -m gpu_manager.worker` without the current folder.

    The folder that contains this package comes first: none of ours is another one of that name.
    """
    root = str(Path(gpu_manager.__file__).parents[1])
    start = f"import runpy, sys; sys.path.insert(0, {root!r}); "
    start += "runpy.run_module('gpu_manager.worker', run_name='__main__')"
    return [sys.executable, "-P", "-c", start, str(os.getpid()), devices, *map(str, descriptors)]
