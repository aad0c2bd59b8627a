"""The client of people's tools: reads the leader's state, and gives it orders."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from scheduler.client.scheduler_client import LISTED, SchedulerClient
from scheduler.model.values import RequestId

_NO_REQUEST = RequestId("")


class OperatorClient(SchedulerClient):
    """Finds the leader as `SchedulerClient` does; programs that only read should wait briefly.

    Raises EventRefused where an order cannot be carried out, CallerNotAllowed where the token does
    not suffice, SchedulerUnreachable where no scheduler leads.
    """

    @property
    def url(self) -> str:
        """The URL of the scheduler that is asked next: the last known leader."""
        return self._at

    async def look(self, mark: str) -> Mapping[str, Any]:
        """The whole state, or its changes since the look with that mark (docs/scheduler.md)."""
        return await self._get_answer(f"/feed?since={quote(mark, safe='')}")

    async def point(self) -> Mapping[str, Any]:
        """The figures of the last seconds, for charts."""
        return await self._get_answer("/feed/point")

    async def policies(self) -> Sequence[Mapping[str, Any]]:
        """Every policy with its description."""
        found: Sequence[Mapping[str, Any]] = (await self._get_answer("/policies"))[LISTED]
        return found

    async def explain(self, request: str) -> Mapping[str, Any]:
        """Why a request was placed where it was, and how it ended."""
        return await self._get_answer(f"/explain/{quote(request)}")

    async def set_policy(self, name: str, parameters: Mapping[str, float]) -> None:
        """Put this policy in force on every scheduler."""
        choice = {"policy": name, "parameters": parameters}
        await self._insist("/policy", lambda: choice, _NO_REQUEST)

    async def order(self, model: str, verb: str, gpu: str | None) -> None:
        """Pin, unpin, prefetch or evict a model."""
        where = "" if gpu is None else f"?gpu={quote(gpu, safe='')}"
        await self._insist(f"/models/{quote(model)}/{verb}{where}", dict, _NO_REQUEST)

    async def _get_answer(self, path: str) -> Mapping[str, Any]:
        return await self._insist(path, lambda: None, _NO_REQUEST)
