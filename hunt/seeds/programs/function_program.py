"""An instance of a function in a simulation: answers HTTP calls, and computes on a GPU for them.

It does what the runtime and the shim do, by the GPU manager's own sessions, without their sockets.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from common.http.asgi import Receive, Scope, Send, header_in, send_response, send_text
from common.http.server import serving
from gpu_manager.errors import LeaseOver, NoWorker, UnknownImage
from gpu_manager.sessions.sessions import ClientSession
from hunt.seeds.programs.list_handler import SimulatedListHandler
from hunt.seeds.programs.manager_link import FAILURES, ManagerLink, ManagerLost
from hunt.seeds.programs.node_program import NodeProgram, image_of
from hunt.seeds.surroundings import Surroundings
from tests.kit.simulation.simulated_loop import SimulatedProgram
from tests.kit.simulation.simulated_network import listener
from torch_shim.wire.messages import Release

PORT = 8100
_ATTEMPTS = 4
_DRAIN_S = 1.0
# The gateway's time limit for calls; functions have none of their own.
TIMEOUT_S = 20.0
_ANY_NUMBER = 1 << 20


class FunctionProgram:
    """One instance on the host of a node; `begun` counts how often each call was begun.

    `begun_again` has those that were begun more than once.
    """

    def __init__(
        self,
        around: Surroundings,
        number: int,
        host: NodeProgram,
        nodes: dict[str, NodeProgram],
        program_of: Callable[[str], SimulatedProgram | None],
    ) -> None:
        self.plan = around.scenario.functions[number]
        self.name = self.plan.name
        self.port = PORT + number
        self.host = host
        self.begun: dict[str, int] = {}
        self.begun_again: list[str] = []
        self._around = around
        self._model = number
        self._nodes = nodes
        self._program_of = program_of
        self._links: dict[str, ManagerLink] = {}
        self._lists: SimulatedListHandler | None = None
        self._threads = asyncio.Semaphore()

    @property
    def address(self) -> str:
        """Where a gateway calls it."""
        return f"tcp:{self.host.name}:{self.port}"

    async def run(self) -> None:
        """Answer calls until cancelled."""
        self._links = {}
        self._threads = asyncio.Semaphore(self.plan.threads or _ANY_NUMBER)
        most = self.plan.batch
        self._lists = SimulatedListHandler(most, self._compute) if most else None
        async with serving(self._app, listener(self.host.name, self.port), _DRAIN_S):
            await asyncio.Event().wait()

    def died(self) -> None:
        """Its connections close."""
        for link in self._links.values():
            link.end()
        self._links = {}

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/_/health":
            await send_text(send, 200, "ok")
            return
        while (await receive()).get("more_body", False):
            pass
        call = header_in(scope, b"x-call-id").decode()
        self.begun[call] = self.begun.get(call, 0) + 1
        if self.begun[call] > 1:
            self.begun_again.append(call)
        self._around.journal.note(f"{self.name} begins {call} for the {self.begun[call]}. time")
        token = header_in(scope, b"x-gpu-lease").decode()
        address = header_in(scope, b"x-gpu-address").decode()
        loop = asyncio.get_running_loop()
        came_s, awaited_s = loop.time(), float(header_in(scope, b"x-gpu-within").decode())
        compute = self._in_thread if self._lists is None else self._lists.handle
        try:
            began_s = await compute(address, token, came_s + awaited_s)
        except FAILURES as error:
            self._around.journal.note(f"{self.name} fails {call}: {type(error).__name__} {error}")
            await send_text(send, 500, f"{type(error).__name__}: {error}")
            return
        _, digest = image_of(self._model)
        headers = [(b"content-type", b"application/json"), (b"x-gpu-models", digest.encode())]
        if began_s is not None and self.plan.threads:
            times_us = [round(1e6 * each_s) for each_s in (loop.time() - began_s, began_s - came_s)]
            report = b"1 h;0;%d;q=%d;t=%d" % (*times_us, self.plan.threads)
            headers.append((b"x-gpu-trace", report))
        await send_response(send, 200, json.dumps(call).encode(), headers)

    async def _in_thread(self, address: str, token: str, ends_s: float) -> float:
        """Make the GPU calls of one call, once it has a thread; when it began."""
        async with self._threads:
            began_s = asyncio.get_running_loop().time()
            for _ in range(self.plan.steps):
                await self._compute(address, token, ends_s)
        return began_s

    async def _compute(self, address: str, given_token: str, ends_s: float) -> None:
        """One GPU call, as the shim makes it: repeated where its worker or its lease has ended."""
        chance, scenario = self._around.chance, self._around.scenario
        run_s = chance.uniform(*scenario.run_s)
        token = given_token or None
        where, given = self._node_at(address), token is not None
        loop = asyncio.get_running_loop()
        failures: list[Exception] = []
        elsewhere: dict[str, Any] | None = None
        while len(failures) < _ATTEMPTS:
            try:
                within_s = max(0.0, ends_s - loop.time())
                elsewhere = await self._call(where, token, run_s, within_s, given=given)
            except UnknownImage:
                await self._upload(where)
                continue
            except (NoWorker, LeaseOver, ManagerLost) as error:
                failures.append(error)
                if elsewhere is not None:
                    await self._give_back(elsewhere["lease"])
                elsewhere, where, token, given = None, self.host, None, False
                continue
            if elsewhere is None:
                return
            where, token = self._nodes[elsewhere["node"]], elsewhere["token"]
        raise failures[-1]

    async def _call(
        self, where: NodeProgram, token: str | None, run_s: float, within_s: float, *, given: bool
    ) -> dict[str, Any] | None:
        """`given`: the lease is the caller's, who gives it back."""
        _, digest = image_of(self._model)
        fields: dict[str, Any] = {"models": [digest], "workers": [], "batch": 1}
        fields["deadline_s"] = within_s
        if token is not None:
            fields["token"] = token

        async def call(session: ClientSession) -> dict[str, Any] | None:
            return await where.call(session, fields, run_s, gives_back=not given)

        return await self._link(where).ask(call)

    async def _give_back(self, lease: int) -> None:
        """Tell the manager that asked for a lease elsewhere that nothing came of it."""

        async def release(session: ClientSession) -> None:
            self.host.acquiring.release(session, Release(lease))

        with suppress(ManagerLost):
            await self._link(self.host).ask(release)

    async def _upload(self, where: NodeProgram) -> None:
        async def upload(session: ClientSession) -> None:
            where.upload(session, self._model, self.plan.memory_mib << 20)

        await self._link(where).ask(upload)

    def _link(self, where: NodeProgram) -> ManagerLink:
        link = self._links.get(where.name)
        if link is None or link.broken:
            program = self._program_of(where.name)
            if program is None:
                raise ManagerLost
            link = self._links[where.name] = ManagerLink(self._around, self.plan, where, program)
        return link

    def _node_at(self, address: str) -> NodeProgram:
        """The node of an address that the caller's lease names, else this host's own."""
        with suppress(IndexError):
            return self._nodes.get(address.split(":")[1], self.host)
        return self.host
