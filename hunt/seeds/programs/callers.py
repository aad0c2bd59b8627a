"""Those who call the functions of a simulation, and take the callbacks of their async calls."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from math import inf

from common.errors import NoResponse
from common.http.asgi import Receive, Scope, Send, header_in, send_text
from common.http.client import HttpClient, HttpConnection
from common.http.server import serving
from common.time_limits import time_limit
from hunt.seeds.programs.gateway_program import PORT, WORKFLOW_PATH
from hunt.seeds.surroundings import Surroundings
from tests.kit.simulation.simulated_network import listener

HOST = "clients"
_CALLBACK_PORT = 9999
_PATIENCE_S = 90.0
_LEAVES_WITHIN_S = 2.0
_BUSY = 0.1  # of all callbacks are refused for the moment
_ACCEPTED = 202
_LEFT = -1
_DRAIN_S = 1.0


@dataclass(slots=True)
class CallRecord:
    """One call: `status` is None while it lasts, 0 where the connection broke.

    `path` is of what it calls: `function/f0.team`, `workflow/w.team`. Its client leaves after
    `leaves_s`.
    """

    id: str
    gateway: str
    path: str
    is_async: bool
    began_s: float
    leaves_s: float = inf
    ended_s: float = 0.0
    status: int | None = None
    why: str = ""
    callbacks: list[str] = field(default_factory=list)

    @property
    def answer(self) -> str:
        """What a function answers to this call."""
        return json.dumps(self.id)

    @property
    def is_accepted(self) -> bool:
        """Whether an async call was promised."""
        return self.is_async and self.status == _ACCEPTED


class CallersProgram:
    """All clients, on one host that nothing befalls."""

    def __init__(self, around: Surroundings) -> None:
        self.name = HOST
        self.calls: dict[str, CallRecord] = {}
        self._around = around
        self._client = HttpClient()
        self._numbers = count(1)
        scenario = around.scenario
        self._paths = [f"function/{each.path}" for each in scenario.functions]
        if scenario.workflow:
            self._paths.append(WORKFLOW_PATH)
        self._tasks: set[asyncio.Task[CallRecord]] = set()

    async def run(self) -> None:
        """Call as the scenario says, and take callbacks for ever."""
        async with serving(self._app, listener(HOST, _CALLBACK_PORT), _DRAIN_S):
            await asyncio.Event().wait()

    async def load(self) -> None:
        """Call each gateway every so often, until the scenario's load ends."""
        scenario, chance, loop = self._around.scenario, self._around.chance, self._around.loop
        rate = scenario.gateways / scenario.every_s
        while True:
            await asyncio.sleep(chance.expovariate(rate))
            if loop.passed_s > scenario.load_s:
                return
            gateway = f"g{chance.randrange(scenario.gateways)}"
            path = chance.choice(self._paths)
            is_async = chance.random() < scenario.async_share
            leaves = chance.random() < scenario.leaving_share
            leaves_s = chance.uniform(0.0, _LEAVES_WITHIN_S) if leaves else inf
            task = asyncio.create_task(
                self.call(gateway, path, is_async=is_async, leaves_s=leaves_s)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @property
    def calling(self) -> int:
        """How many calls have no answer yet."""
        return len(self._tasks)

    async def call(
        self, gateway: str, path: str, *, is_async: bool = False, leaves_s: float = inf
    ) -> CallRecord:
        """One call, to its end."""
        journal, loop = self._around.journal, self._around.loop
        id_ = f"c{next(self._numbers)}"
        record = CallRecord(id_, gateway, path, is_async, loop.passed_s, leaves_s)
        self.calls[record.id] = record
        journal.note(f"{record.id} calls {path} at {gateway}{' later' if is_async else ''}")
        try:
            async with time_limit(min(_PATIENCE_S, leaves_s)):
                record.status, record.why = await self._answered(record)
        except NoResponse as error:
            record.status, record.why = 0, str(error)
        except TimeoutError:
            record.status, record.why = _LEFT, "its client left"
            if leaves_s >= _PATIENCE_S:
                journal.violated(f"{record.id} had no answer within {_PATIENCE_S:g} s")
        record.ended_s = loop.passed_s
        journal.note(f"{record.id} ends: {record.status} {record.why[:120]}")
        return record

    async def ask(
        self, gateway: str, method: str, path: str, headers: Iterable[str], body: str
    ) -> tuple[int, str]:
        """One request: status and body of its answer; NoResponse without one."""
        head = [f"{method} /{path} HTTP/1.1", "host: gateway", *headers]
        text = "\r\n".join([*head, f"content-length: {len(body)}", "", body])
        address = f"tcp:{gateway}:{PORT}"
        connection = self._client.idle(address) or await self._client.connect(address)
        try:
            await connection.ask(text.encode())
            found = await _whole(connection)
            return connection.status, found.decode()
        finally:
            connection.let_go()

    async def _answered(self, record: CallRecord) -> tuple[int, str]:
        headers, path = [f"x-call-id: {record.id}"], record.path
        if record.is_async:
            headers.append(f"x-callback-url: http://{HOST}:{_CALLBACK_PORT}/{record.id}")
            path = f"async-{path}"
        return await self.ask(record.gateway, "POST", path, headers, "{}")

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass
        id_, status = scope["path"][1:], header_in(scope, b"x-function-status").decode()
        if self._around.chance.random() < _BUSY:
            await send_text(send, 503, "later")
            return
        self.calls[id_].callbacks.append(status)
        self._around.journal.note(f"{id_} is called back: {status}")
        await send_text(send, 200, "ok")


async def _whole(connection: HttpConnection) -> bytes:
    parts = []
    while True:
        if not connection.readable:
            await connection.more()
        parts.append(connection.take())
        if connection.complete:
            return b"".join(parts)
