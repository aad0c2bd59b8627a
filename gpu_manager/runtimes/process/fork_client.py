"""The manager's side of the fork server: start it, ask it for workers, know when each is gone."""

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
from pathlib import Path
from typing import TypeVar

import gpu_manager
from gpu_manager.errors import LoadFailure, NoWorker
from gpu_manager.wire.frame_stream import FrameStream
from gpu_manager.worker import worker_orders
from torch_shim.errors import BadFrame, ConnectionLost, WireError

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0  # importing torch from a cold disk
_FORK_TIMEOUT_S = 10.0
_MAX_ORDER_BYTES = 1 << 20  # of metadata; nothing that a worker says has a body

Awaited = TypeVar("Awaited", bound=worker_orders.WorkerOrder)


class ForkedWorker:
    """A worker process: its orders and its reports, until it is gone."""

    def __init__(self, pid: int, pidfd: int, connection: socket.socket) -> None:
        self.name = secrets.token_hex(8)
        self.pid = pid
        self.cause = ""
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self._pidfd = pidfd
        self.stream = FrameStream(connection, _MAX_ORDER_BYTES, 0)
        loop.add_reader(pidfd, self._exit)

    async def tell(self, order: worker_orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Send an order, waiting for room if need be."""
        await self.stream.send(worker_orders.KINDS[type(order)], list(order), (), descriptors)

    def tell_soon(self, order: worker_orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Send an order at once; a worker that does not read its orders is killed."""
        if self.exited.done():
            return
        if not self.stream.send_now(worker_orders.KINDS[type(order)], list(order), descriptors):
            self.kill("it takes no orders")

    async def hear(self) -> worker_orders.WorkerOrder:
        """The next report."""
        frame = await self.stream.read()
        for descriptor in frame.descriptors:  # no report carries any
            os.close(descriptor)
        return worker_orders.read(frame.kind, frame.meta)

    async def answer(self, awaited: type[Awaited]) -> Awaited:
        """The next report of this kind; a failed load is raised, other reports are logged."""
        while True:
            order = await self.hear()
            if isinstance(order, awaited):
                return order
            if isinstance(order, worker_orders.ImageLoadFailed):
                raise LoadFailure(self.name, order.detail, out_of_memory=order.out_of_memory)
            log.info("worker %s reported out of turn: %.300r", self.name, order)

    def kill(self, cause: str) -> None:
        """End the process, whatever state it is in; the first cause given is the one reported."""
        self.cause = self.cause or cause
        if self.exited.done():
            return
        with contextlib.suppress(ProcessLookupError):  # it is dead, and this loop is yet to see it
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def gone(self, cause: str) -> None:
        """Wait for the end of a process that has hung up."""
        self.stream.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.exited), 0.1)
        except TimeoutError:
            self.kill(cause)
            await self.exited
        self.cause = self.cause or cause

    def close(self) -> None:
        """Close the stream of orders and reports."""
        self.stream.close()

    def _exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if not self.exited.done():
            self.exited.set_result(None)
        # Its last reports are still to be read: the reader closes the stream.


class ForkServer:
    """Makes workers. When its process has died, the next fork starts another one."""

    def __init__(self, *, emulated: bool = False) -> None:
        """`emulated` says that no worker will use CUDA."""
        self._devices = "cpu" if emulated else "cuda"
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: FrameStream | None = None
        self._numbers = itertools.count(1)
        self._asking = asyncio.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Its process, if there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Have it running, with torch imported."""
        async with self._asking:
            await self._ensure()

    async def fork(self) -> ForkedWorker:
        """A fresh worker; NoWorker if there is none to be had."""
        # A cancelled request must not leave its answer unread: the next one would take it.
        forking = asyncio.ensure_future(self._fork_in_turn())
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_discard)
            raise

    async def close(self) -> None:
        """End its process, and with it every worker that still lives."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # it may be importing torch, and a fork waits for that
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
                order = worker_orders.Fork(number)
                await stream.send(
                    worker_orders.KINDS[worker_orders.Fork], list(order), (), [theirs.fileno()]
                )
            async with asyncio.timeout(_FORK_TIMEOUT_S):
                frame = await stream.read()
        except BaseException:
            ours.close()
            raise
        made = worker_orders.read(frame.kind, frame.meta)
        if not isinstance(made, worker_orders.Forked) or made.number != number:
            ours.close()
            raise BadFrame(f"{frame.kind.name} instead of a worker")
        (pidfd,) = frame.descriptors
        return ForkedWorker(made.pid, pidfd, ours)

    async def _ensure(self) -> FrameStream:
        if self._closed:
            raise ConnectionLost("the runtime is closed")
        process, stream = self._process, self._stream
        if process is not None and stream is not None and process.poll() is None:
            return stream
        await self._stop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                _command(theirs.fileno(), self._devices),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is the manager's to handle
            )
        stream = self._stream = FrameStream(ours, _MAX_ORDER_BYTES, 0)
        async with asyncio.timeout(_START_TIMEOUT_S):
            frame = await stream.read()
        for missing in frame.meta[0]:
            log.warning("workers run without: %s", missing)
        return stream

    async def _stop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.get_running_loop().run_in_executor(None, process.wait)


def _discard(forking: "asyncio.Future[ForkedWorker]") -> None:
    """End a worker whose request was cancelled."""
    if not forking.cancelled() and forking.exception() is None:
        worker = forking.result()
        worker.kill("its request was cancelled")
        worker.close()


def _command(descriptor: int, devices: str) -> list[str]:
    """How the fork server is run: `python -m gpu_manager.worker`, the current directory aside.

    The place where this package was found comes last on its path, for runs from a source tree.
    """
    root = str(Path(gpu_manager.__file__).parents[1])
    start = f"import runpy, sys; sys.path.append({root!r}); "
    start += "runpy.run_module('gpu_manager.worker', run_name='__main__')"
    return [sys.executable, "-P", "-c", start, str(descriptor), str(os.getpid()), devices]
