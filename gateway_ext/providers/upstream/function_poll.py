"""Polls another provider, more often after a change, and reports changes to a listener."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from common.time_limits import time_limit
from gateway_ext.errors import BadDeployment, GatewayError
from gateway_ext.model import Deployment, Endpoint, FunctionId, FunctionStatus
from gateway_ext.ports import FunctionListener
from gateway_ext.providers.upstream.provider_http import ProviderSite

_log = logging.getLogger(__name__)

# The short interval, used while replicas are missing, and for how long it is used.
_SOON_S, _PATIENCE_S = 0.2, 60.0


class _ReportedFunction(NamedTuple):
    """What was reported of a function last."""

    deployment: Deployment
    available: int
    wanted: int


class FunctionPoll:
    """Keeps one listener up to date about all functions; polls never overlap."""

    def __init__(
        self,
        site: ProviderSite,
        everything: Callable[[], Awaitable[Sequence[FunctionStatus]]],
        every_s: float,
    ) -> None:
        self._site = site
        self._everything = everything
        self._every_s = every_s
        self._listener: FunctionListener | None = None
        self._reported: dict[FunctionId, _ReportedFunction] = {}
        self._unsettled = False
        self._short_until_s = 0.0
        self._polling = asyncio.Lock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failed = False

    async def start(self, listener: FunctionListener) -> None:
        """Poll once, then regularly; a failure of the first poll is raised."""
        self._listener = listener
        self._shorten_interval()
        await self._poll()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def poll_now(self) -> None:
        """Poll after a change; unless that fails, the listener knows of it when this returns."""
        self._shorten_interval()
        await self._try_to_poll()
        self._wake.set()

    async def _run(self) -> None:
        while True:
            near = self._unsettled and asyncio.get_running_loop().time() < self._short_until_s
            with contextlib.suppress(TimeoutError):
                async with time_limit(min(_SOON_S, self._every_s) if near else self._every_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._try_to_poll()

    async def _try_to_poll(self) -> None:
        """While the other provider cannot be reached, the listener keeps what was reported."""
        try:
            await self._poll()
        except GatewayError as error:
            if not self._failed:
                _log.warning("the upstream provider cannot be asked: %s", error)
            self._failed = True
            return
        if self._failed:
            _log.info("the upstream provider answers again")
        self._failed = False

    async def _poll(self) -> None:
        async with self._polling:
            found = {status.deployment.id: status for status in await self._everything()}
            assert self._listener is not None, "polled only after the start"
            for function in [id_ for id_ in self._reported if id_ not in found]:
                del self._reported[function]
                self._listener.function_gone(function)
            for status in found.values():
                self._report(self._listener, status)
            self._unsettled = any(
                status.available_replicas < status.replicas for status in found.values()
            )

    def _report(self, listener: FunctionListener, status: FunctionStatus) -> None:
        id_ = status.deployment.id
        now = _ReportedFunction(status.deployment, status.available_replicas, status.replicas)
        if self._reported.get(id_) == now:
            return
        self._reported[id_] = now
        endpoints = [self._endpoint(id_, number) for number in range(now.available)]
        try:
            listener.function_is(status.deployment, endpoints, wanted=now.wanted)
        except BadDeployment as error:
            _log.warning("%s was deployed elsewhere, and is not served: %s", id_, error)

    def _endpoint(self, function: FunctionId, number: int) -> Endpoint:
        """One endpoint for each replica, so that limits for each instance apply as they should.

        The endpoints differ in their names only: the other provider chooses the replica of a call.
        """
        host = f"[{self._site.host}]" if ":" in self._site.host else self._site.host
        address = f"tcp:{host}:{self._site.port}"
        return Endpoint(f"{function}/{number}", address, f"{self._site.path}/function/{function}")

    def _shorten_interval(self) -> None:
        self._short_until_s = asyncio.get_running_loop().time() + _PATIENCE_S
