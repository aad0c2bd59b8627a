"""Looks at what another provider has, often after a change, and tells a listener what is new."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from gateway_ext.errors import BadDeployment, GatewayError
from gateway_ext.model import Deployment, Endpoint, FunctionId, FunctionStatus
from gateway_ext.ports import Listener
from gateway_ext.providers.upstream.asking import Site

_log = logging.getLogger(__name__)

# While replicas are still to come, and how long they are waited for so closely.
_SOON_S, _PATIENCE_S = 0.2, 60.0


class _Seen(NamedTuple):
    """What the listener was told of a function."""

    deployment: Deployment
    available: int
    wanted: int


class Watch:
    """One listener's view of all functions; looks are made one after another."""

    def __init__(
        self,
        site: Site,
        everything: Callable[[], Awaitable[Sequence[FunctionStatus]]],
        every_s: float,
    ) -> None:
        self._site = site
        self._everything = everything
        self._every_s = every_s
        self._listener: Listener | None = None
        self._seen: dict[FunctionId, _Seen] = {}
        self._unsettled = False
        self._close_until_s = 0.0
        self._looking = asyncio.Lock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failed = False

    async def start(self, listener: Listener) -> None:
        """Look once, then again and again; what goes wrong the first time is raised."""
        self._listener = listener
        self._look_closely()
        await self._look()
        self._task = asyncio.create_task(self._go_on())

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def look_now(self) -> None:
        """After a change: the listener knows of it when this returns, if it could be seen."""
        self._look_closely()
        await self._try_to_look()
        self._wake.set()

    async def _go_on(self) -> None:
        while True:
            near = self._unsettled and asyncio.get_running_loop().time() < self._close_until_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_SOON_S, self._every_s) if near else self._every_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._try_to_look()

    async def _try_to_look(self) -> None:
        """What was known stays so while the other provider is away."""
        try:
            await self._look()
        except GatewayError as error:
            if not self._failed:
                _log.warning("the upstream provider cannot be asked: %s", error)
            self._failed = True
            return
        if self._failed:
            _log.info("the upstream provider answers again")
        self._failed = False

    async def _look(self) -> None:
        async with self._looking:
            found = {status.deployment.id: status for status in await self._everything()}
            assert self._listener is not None, "it looks only once it was started"
            for function in [id_ for id_ in self._seen if id_ not in found]:
                del self._seen[function]
                self._listener.function_gone(function)
            for status in found.values():
                self._tell(self._listener, status)
            self._unsettled = any(
                status.available_replicas < status.replicas for status in found.values()
            )

    def _tell(self, listener: Listener, status: FunctionStatus) -> None:
        id_ = status.deployment.id
        now = _Seen(status.deployment, status.available_replicas, status.replicas)
        if self._seen.get(id_) == now:
            return
        self._seen[id_] = now
        endpoints = [self._endpoint(id_, number) for number in range(now.available)]
        try:
            listener.function_is(status.deployment, endpoints, wanted=now.wanted)
        except BadDeployment as error:
            _log.warning("%s was deployed elsewhere, and is not served: %s", id_, error)

    def _endpoint(self, function: FunctionId, number: int) -> Endpoint:
        """One of as many as there are replicas, so that what bounds an instance is counted right.

        They differ in their name alone: the other provider chooses who gets which call.
        """
        host = f"[{self._site.host}]" if ":" in self._site.host else self._site.host
        address = f"tcp:{host}:{self._site.port}"
        return Endpoint(f"{function}/{number}", address, f"{self._site.path}/function/{function}")

    def _look_closely(self) -> None:
        self._close_until_s = asyncio.get_running_loop().time() + _PATIENCE_S
