"""One instance: a process that serves one function through one socket, until it ends."""

import asyncio
import contextlib
import math
import secrets
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

from common.liveness import LivenessTimes, signal_name, until_frozen
from gateway_ext.model import Endpoint
from gateway_ext.providers.managed.instance import answers, exited_with, wait_until_ready
from gateway_ext.providers.managed.logs import OutputPipe
from gateway_ext.providers.process import processes
from gateway_ext.providers.process.launch import (
    InstanceProcess,
    LaunchedProcess,
    LaunchOrders,
    launch,
)
from gateway_ext.providers.process.template import FunctionTemplate
from gateway_ext.providers.process.template_run import (
    TemplatePlace,
    mark_of,
    named,
    new_name,
)

_BACKLOG = 1024
_DRAIN_OUTPUT_S = 0.5
# A function that is stopped is replaced soon. One that only does not answer may have a handler that
# blocks its event loop, which no call should do for much longer than the function's time limit.
LIVENESS = LivenessTimes(look_s=0.75, ask_s=10.0)
_BLOCKED_S = 600.0


class ChildPlace(NamedTuple):
    """What instances of a function share; `changed` is called when one takes no more calls."""

    changed: Callable[[], None]
    sockets: Path
    processes: TemplatePlace
    memory_bytes: int | None
    timeout_s: float


class ChildInstance:
    """A process from its start to its end, with all processes that descend from it."""

    def __init__(
        self,
        name: str,
        path: Path,
        process: InstanceProcess,
        place: ChildPlace,
        template: FunctionTemplate | None,
    ) -> None:
        """`template` is what the process is a fork of."""
        self.name = name
        self._template = template
        self.ready = False
        self.memory_bytes = place.memory_bytes
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._place = place
        self._why = ""
        self._stopping = False
        self._path = path
        self._process = process
        place.processes.leaders.add(process.pid)
        process.gone.add_done_callback(self._leave)
        process.exited.add_done_callback(self._handle_exit)

    @classmethod
    async def start(
        cls, orders: LaunchOrders, template: FunctionTemplate, place: ChildPlace
    ) -> Self:
        """An instance that is a fork of the template or, without a usable one, started anew."""
        name = new_name(place.processes)
        path = place.sockets / f"{secrets.token_hex(5)}.sock"
        listener = _listener(path)
        try:
            forked = await template.fork(name, listener.fileno())
            process: InstanceProcess = forked or InstanceProcess.started(
                _started(orders, name, listener, place)
            )
        except BaseException:
            path.unlink()
            raise
        finally:
            listener.close()  # the process has its own: after its end connections are refused
        return cls(name, path, process, place, None if forked is None else template)

    @property
    def pid(self) -> int:
        """The leader of its session."""
        return self._process.pid

    @property
    def is_warm(self) -> bool:
        """Whether it began with what the example calls had traced."""
        return self._process.is_warm

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.name, f"unix:{self._path}", exited=self.exited)

    async def collect_output(self) -> None:
        """Store its output until it has ended; then kill all processes that it has started."""
        pipe = OutputPipe(self._process.output, self._store)
        watching = asyncio.create_task(self._kill_if_frozen())
        try:
            await asyncio.shield(self.exited)
            await asyncio.to_thread(processes.end_marked, mark_of(self.name, self._place.processes))
            with contextlib.suppress(TimeoutError):  # a process without the mark holds the pipe
                await asyncio.wait_for(pipe.ended, _DRAIN_OUTPUT_S)
        finally:
            watching.cancel()
            pipe.close()

    async def until_ready(self, within_s: float) -> bool:
        self.ready = await wait_until_ready(self._is_ready, self.exited, within_s)
        if self._template is not None and not self._stopping:
            self._template.fork_ended_up(ready=self.ready)
        return self.ready

    async def stop(self, within_s: float) -> None:
        self.ready = False
        self._stopping = True
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self.exited), within_s)
        except TimeoutError:
            why = f"was killed: it did not end within {within_s:g} s"
            self._store([why])
            self.kill(why)
            await asyncio.shield(self.exited)

    def kill(self, why: str) -> None:
        """Kill its session at once; `why` is the reason that `exited` resolves to."""
        if not self.exited.done() and not self._why:
            self._why = why
        if not self.exited.done():
            processes.kill_session(self._process.pid)
            self._signal(signal.SIGKILL)

    def enforce_memory_limit(self, usage: processes.ProcessUsage) -> None:
        limit_bytes = self.memory_bytes
        if limit_bytes is not None and usage.own_bytes > limit_bytes:
            self.kill(
                f"was killed: it took {usage.own_bytes >> 20} MiB of memory,"
                f" its limit is {limit_bytes >> 20} MiB"
            )

    def usage(self) -> processes.ProcessUsage:
        """Resources of all processes in its session."""
        if self.exited.done():
            return processes.ProcessUsage(0.0, 0, 0)
        return processes.usage(processes.sessions().get(self.pid, []))

    def _store(self, lines: list[str]) -> None:
        self._place.processes.log.write(self.name, *lines)

    def _signal(self, number: int) -> None:
        if not self.exited.done():
            self._process.send_signal(number)

    def _leave(self, _: asyncio.Future[None]) -> None:
        """Take no call any more: callers notice the end of a process as soon as it is there."""
        if self.ready:
            self.ready = False
            self._place.changed()

    def _handle_exit(self, ended: asyncio.Future[int]) -> None:
        self._place.processes.leaders.discard(self.pid)
        self.ready = False
        self._path.unlink(missing_ok=True)
        self.exited.set_result(self._why or _described(ended.result()))

    async def _kill_if_frozen(self) -> None:
        blocked_s = self._place.timeout_s + _BLOCKED_S
        times = replace(LIVENESS, blocked_s=blocked_s, start_s=math.inf)
        why = await until_frozen(self.pid, self._answers, times)
        self.kill(f"was killed: it {why}")

    async def _answers(self) -> bool:
        return self.ready and await self._answers_at(b"health")

    async def _is_ready(self) -> bool:
        return await self._answers_at(b"ready")

    async def _answers_at(self, route: bytes) -> bool:
        return await answers(asyncio.open_unix_connection(str(self._path)), route)


def _started(
    orders: LaunchOrders, name: str, listener: socket.socket, place: ChildPlace
) -> LaunchedProcess:
    served = {"GPUFAAS_LISTEN": f"fd:{listener.fileno()}"}
    environment = {**orders.environment, **named(name, place.processes), **served}
    return launch(replace(orders, environment=environment), [listener.fileno()])


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _described(status: int) -> str:
    if status >= 0:
        return exited_with(status)
    return f"was ended by {signal_name(-status)}"
