"""One instance: a process that serves one function through one socket, until it ends."""

import asyncio
import contextlib
import math
import os
import secrets
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from common.liveness import LivenessTimes, until_frozen
from gateway_ext.model import Endpoint
from gateway_ext.providers.managed.logs.function_log import FunctionLog
from gateway_ext.providers.managed.logs.output_pipe import OutputPipe
from gateway_ext.providers.managed.readiness import (
    PollIntervals,
    answers_health,
    answers_ready,
    wait_until_ready,
)
from gateway_ext.providers.process import process_table
from gateway_ext.providers.process.process_launch import MARK, LaunchOrders, launch

_BACKLOG = 1024
_INTERVALS = PollIntervals(first_s=0.02, first_phase_s=2.0)
_DRAIN_OUTPUT_S = 0.5
# A function that is stopped is replaced soon. One that only does not answer may have a handler that
# blocks its event loop, which no call should do for much longer than the function's time limit.
LIVENESS = LivenessTimes(look_s=0.75, ask_s=10.0)
_BLOCKED_S = 600.0


class ChildPlace(NamedTuple):
    """What instances of a function share; `mark` identifies processes of this gateway.

    `leaders` has the leaders of all sessions that run.
    """

    sockets: Path
    log: FunctionLog
    mark: str
    leaders: set[int]
    memory_bytes: int | None
    timeout_s: float


class ChildInstance:
    """A process from its start to its end, with all processes that descend from it."""

    def __init__(self, function: str, orders: LaunchOrders, place: ChildPlace) -> None:
        self.name = f"{function}-{secrets.token_hex(4)}"
        self.ready = False
        self.memory_bytes = place.memory_bytes
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._place = place
        self._why = ""
        self._path = place.sockets / f"{secrets.token_hex(5)}.sock"
        self._mark = f"{place.mark}/{self.name}"
        listener = _listener(self._path)
        try:
            started = launch(self._complete(orders, listener), [listener.fileno()])
        except BaseException:
            self._path.unlink()
            raise
        finally:
            listener.close()  # the process has its own: after its end connections are refused
        self._process = started.process
        self._output = started.output
        place.leaders.add(started.process.pid)
        self._pidfd = os.pidfd_open(started.process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._handle_exit)

    @property
    def pid(self) -> int:
        """The leader of its session."""
        return self._process.pid

    @property
    def endpoint(self) -> Endpoint:
        """Where it is called."""
        return Endpoint(self.name, f"unix:{self._path}")

    async def collect_output(self) -> None:
        """Store its output until it has ended; then kill all processes that it has started."""
        pipe = OutputPipe(self._output, lambda lines: self._place.log.write(self.name, *lines))
        watching = asyncio.create_task(self._kill_if_frozen())
        try:
            await asyncio.shield(self.exited)
            await asyncio.to_thread(process_table.end_marked, self._mark)
            with contextlib.suppress(TimeoutError):  # a process without the mark holds the pipe
                await asyncio.wait_for(pipe.ended, _DRAIN_OUTPUT_S)
        finally:
            watching.cancel()
            pipe.close()

    async def until_ready(self, within_s: float) -> bool:
        """True once it can be called; False if it ends first or `within_s` passes."""
        self.ready = await wait_until_ready(self._is_ready, self.exited, within_s, _INTERVALS)
        return self.ready

    async def stop(self, within_s: float) -> None:
        """Ask it to end; kill it after `within_s`."""
        self.ready = False
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self.exited), within_s)
        except TimeoutError:
            self.kill(f"was killed: it did not end within {within_s:g} s")
            await asyncio.shield(self.exited)

    def kill(self, why: str) -> None:
        """Kill its session at once; `why` is the reason that `exited` resolves to."""
        if not self.exited.done() and not self._why:
            self._why = why
            self._place.log.write(self.name, why)
        if not self.exited.done():
            process_table.kill_session(self._process.pid)
            self._signal(signal.SIGKILL)

    def enforce_memory_limit(self, usage: process_table.ProcessUsage) -> None:
        """Kill it if it uses more memory than its limit."""
        limit_bytes = self.memory_bytes
        if limit_bytes is not None and usage.own_bytes > limit_bytes:
            self.kill(
                f"was killed: it took {usage.own_bytes >> 20} MiB of memory,"
                f" its limit is {limit_bytes >> 20} MiB"
            )

    def usage(self) -> process_table.ProcessUsage:
        """Resources of all processes in its session."""
        if self.exited.done():
            return process_table.ProcessUsage(0.0, 0, 0)
        return process_table.usage(process_table.sessions().get(self.pid, []))

    def _complete(self, orders: LaunchOrders, listener: socket.socket) -> LaunchOrders:
        environment = {
            **orders.environment,
            "HOSTNAME": self.name,
            "GPUFAAS_LISTEN": f"fd:{listener.fileno()}",
            MARK: self._mark,
        }
        return replace(orders, environment=environment)

    def _signal(self, number: int) -> None:
        if not self.exited.done():
            self._process.send_signal(number)

    def _handle_exit(self) -> None:
        status = self._process.poll()
        if status is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._place.leaders.discard(self.pid)
        self.ready = False
        self._path.unlink(missing_ok=True)
        self.exited.set_result(self._why or _described(status))

    async def _kill_if_frozen(self) -> None:
        blocked_s = self._place.timeout_s + _BLOCKED_S
        times = replace(LIVENESS, blocked_s=blocked_s, start_s=math.inf)
        why = await until_frozen(self.pid, self._answers, times)
        self.kill(f"was killed: it {why}")

    async def _answers(self) -> bool:
        if not self.ready:
            return False
        return await answers_health(asyncio.open_unix_connection(str(self._path)))

    async def _is_ready(self) -> bool:
        connecting = asyncio.open_unix_connection(str(self._path))
        return await answers_ready(connecting, has_our_runtime=True)


def _listener(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(str(path))
    path.chmod(0o600)
    found.listen(_BACKLOG)
    return found


def _described(status: int) -> str:
    if status >= 0:
        return f"exited with {status}"
    return f"was ended by {signal.Signals(-status).name}"
