"""Child processes of a bench, which serve or put a load: started, asked and ended."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import uvloop

from bench.measure.process_usage import processor_s
from gpufaas.daemon_process import freeze_started_objects


class ChildFailed(Exception):
    """A child process ended with an error, which it has written to standard error."""


class ParentPipe:
    """The child's end of the pipe: the child reports that it is ready, takes orders and answers."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def ready(self, address: str = "") -> None:
        """Report that the child is ready, and the address where it serves, if it serves."""
        freeze_started_objects()  # as our daemons do: else the collector takes a tenth of the time
        self._pipe.send(address)

    async def order(self) -> Any:
        """The next order; None once the parent has closed the pipe. The loop runs meanwhile."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pipe.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._pipe.fileno())
        try:
            return self._pipe.recv()
        except EOFError:
            return None

    def answer(self, result: object) -> None:
        """Answer the last order."""
        self._pipe.send(result)


Work = Callable[..., Awaitable[None]]  # takes the ParentPipe first, ends when the parent has closed

MakeLoop = Callable[[], asyncio.AbstractEventLoop]


class ChildProcess:
    """A child process that is ready; `address` is where it serves."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        assert process.pid is not None, "the process was started"
        self.pid = process.pid
        self._pipe = pipe
        try:
            self.address = str(pipe.recv())
        except EOFError as error:
            raise ChildFailed(f"{process.name} ended before it was ready") from error

    def ask(self, order: object) -> Any:
        """Send one order and wait for its answer."""
        self._pipe.send(order)
        return self._pipe.recv()

    def processor_s(self) -> float:
        """Processor time that the process has taken so far."""
        return processor_s(self.pid)


@contextmanager
def child_process(
    work: Work, *arguments: object, loop: MakeLoop = uvloop.new_event_loop
) -> Iterator[ChildProcess]:
    """Run a coroutine function in a process of its own for as long as the context lasts."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(work, theirs, loop, *arguments))
    process.start()
    theirs.close()
    try:
        yield ChildProcess(process, ours)
    finally:
        ours.close()
        process.join()
    if process.exitcode:
        raise ChildFailed(f"{process.name} ended with {process.exitcode}")


def _run(work: Work, pipe: Connection, loop: MakeLoop, *arguments: object) -> None:
    async def run() -> None:
        await work(ParentPipe(pipe), *arguments)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
