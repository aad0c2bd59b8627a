"""The client of gateways' pages and pins: reads the leader's state, and gives it orders."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from cache_manager.model.ids import ModelId
from scheduler.client.scheduler_urls import SchedulerUrls
from scheduler.model.errors import (
    CallerNotAllowed,
    EventRefused,
    MalformedRequest,
    SchedulerError,
    SchedulerUnreachable,
)

_CONNECT_S = 2.0
# A scheduler answers at once; a frozen one keeps its connections open and says nothing.
_ANSWERED_S = 2.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
_OK, _DONE, _UNAUTHORIZED = 200, 204, 401
_NOT_LEADING, _STORE_AWAY = "not-leading", "store-away"
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class OperatorClient:
    """Asks any of several schedulers, one of which leads; use as a context.

    An order is given again, and a question asked again, until a leader answers or none has been
    found for `patience_s` and each URL was asked; programs that only read should wait briefly. A
    scheduler that is silent counts as gone; a prefetch or an evict that it may have received is not
    given to another one. Raises EventRefused where an order cannot be carried out, CallerNotAllowed
    where the token does not suffice, SchedulerUnreachable where no scheduler leads, or where the
    leader cannot reach its datastore.
    """

    def __init__(self, urls: Sequence[str], token: str, *, patience_s: float = 30.0) -> None:
        self._schedulers = SchedulerUrls(urls)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_ANSWERED_S, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(self, *failure: object) -> None:
        assert self._session is not None, "it was entered"
        await self._session.close()

    @property
    def url(self) -> str:
        """The URL of the scheduler that is asked next: the last known leader."""
        return self._schedulers.at

    # -- the leader's state -----------------------------------------------------------------------

    async def look(self, mark: str) -> Mapping[str, Any]:
        """The whole state, or its changes since the look with that mark (docs/scheduler.md)."""
        return await self._fields(f"/feed?since={quote(mark, safe='')}")

    async def point(self) -> Mapping[str, Any]:
        return await self._fields("/feed/point")

    async def policies(self) -> Sequence[Mapping[str, Any]]:
        return await self._rows("/policies")

    async def explain(self, request: str) -> Mapping[str, Any]:
        return await self._fields(f"/explain/{quote(request)}")

    async def model(self, model: str) -> Mapping[str, Any]:
        return await self._fields(f"/models/{quote(model)}")

    async def bill(self, by: str, last_s: float) -> Mapping[str, Any]:
        """Who used what in the last seconds: by function, namespace or model (docs/billing.md)."""
        return await self._fields(f"/bill?by={quote(by, safe='')}&last_s={last_s}")

    async def pinned(self) -> frozenset[ModelId]:
        return frozenset(
            ModelId(model["model"])
            for model in await self._rows("/models")
            if any(holder["pinned"] for holder in model["holders"])
        )

    # -- orders, which need an administrator's token ----------------------------------------------

    async def set_policy(self, name: str, parameters: Mapping[str, float]) -> None:
        """Put this policy in force on every scheduler."""
        await self._insist("/policy", {"policy": name, "parameters": parameters})

    async def pin(self, model: ModelId) -> None:
        """Keep the model wherever it is in GPU memory; refused if no GPU holds it."""
        await self.order(model, "pin", None)

    async def unpin(self, model: ModelId) -> None:
        """Let the model be evicted again; refused if no GPU holds it."""
        await self.order(model, "unpin", None)

    async def order(self, model: str, verb: str, gpu: str | None) -> None:
        where = "" if gpu is None else f"?gpu={quote(gpu, safe='')}"
        path = f"/models/{quote(model)}/{verb}{where}"
        await self._insist(path, {}, once=verb in GIVEN_ONCE)

    # -- asking until there is an answer ----------------------------------------------------------

    async def _fields(self, path: str) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = await self._insist(path)
        return answer

    async def _rows(self, path: str) -> Sequence[Mapping[str, Any]]:
        rows: Sequence[Mapping[str, Any]] = await self._insist(path)
        return rows

    async def _insist(
        self, path: str, order: Mapping[str, object] | None = None, *, once: bool = False
    ) -> Any:
        """The leader's answer to an order, or to a question if there is none.

        An error that concerns what was asked is raised at once. What is given `once` is not given
        again where it may have been received.
        """
        give_up_s = time.monotonic() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        asked: set[str] = set()
        while True:
            at = self._schedulers.at
            asked.add(at)
            try:
                status, answer = await self._ask(at + path, order)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                trouble = f"{at}: {error!r}"
                self._schedulers.move(at)
                if once and not isinstance(error, _NOT_SENT):
                    raise SchedulerUnreachable(f"{trouble}; it may be carried out") from error
            else:
                if status in {_OK, _DONE}:
                    return answer
                if answer.get("error") != _NOT_LEADING:
                    raise _error_of(status, answer)
                trouble = str(answer.get("message"))
                self._schedulers.move(at, answer.get("leader"))
            if time.monotonic() > give_up_s and not self._schedulers.turn_to_another(asked):
                raise SchedulerUnreachable(f"no scheduler leads: {trouble}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _ask(self, url: str, order: Mapping[str, object] | None) -> tuple[int, Any]:
        """The status and the answer; ValueError if it is nothing that a scheduler says."""
        assert self._session is not None, "use it as a context"
        method = "GET" if order is None else "POST"
        async with self._session.request(method, url, json=order) as response:
            text = await response.read()
        answer = {} if response.status == _DONE else json.loads(text)
        if not isinstance(answer, (dict, list) if response.status == _OK else dict):
            raise ValueError(f"status {response.status} without a reason")
        return response.status, answer


def _error_of(status: int, answer: Mapping[str, Any]) -> SchedulerError:
    message = str(answer.get("message", f"status {status}"))
    if answer.get("error") == "not-allowed":
        return CallerNotAllowed(message, known=status != _UNAUTHORIZED)
    if answer.get("error") == _STORE_AWAY:
        return SchedulerUnreachable(message)
    if answer.get("error") == "bad-request":
        return MalformedRequest(message)
    return EventRefused(None, message)


# Given twice, a prefetch may load a second copy, and an evict is refused: it was carried out.
GIVEN_ONCE = frozenset({"prefetch", "evict"})
