"""The scheduler for people's tools: looks at whoever leads, and gives it orders."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from scheduler.client import LISTED, SchedulerClient
from scheduler.model import RequestId

_NOBODY = RequestId("")


class Console(SchedulerClient):
    """Asks as `SchedulerClient` does; whoever only looks should have little patience.

    Refused where an order cannot be obeyed, NotAllowed where the token lets nobody do that,
    Unreachable where no scheduler leads.
    """

    @property
    def url(self) -> str:
        """Of the scheduler that is asked next: the one that led last."""
        return self._at

    async def look(self, mark: str) -> Mapping[str, Any]:
        """Everything, or what is new since the look of that mark (docs/scheduler.md)."""
        return await self._said(f"/feed?since={quote(mark, safe='')}")

    async def point(self) -> Mapping[str, Any]:
        """The last seconds, as charts show them."""
        return await self._said("/feed/point")

    async def policies(self) -> Sequence[Mapping[str, Any]]:
        """Every policy there is, in its own words."""
        found: Sequence[Mapping[str, Any]] = (await self._said("/policies"))[LISTED]
        return found

    async def explain(self, request: str) -> Mapping[str, Any]:
        """Why a request went where it went, and what came of it."""
        return await self._said(f"/explain/{quote(request)}")

    async def set_policy(self, name: str, parameters: Mapping[str, float]) -> None:
        """Place by this policy from now on, on every scheduler."""
        choice = {"policy": name, "parameters": parameters}
        await self._insist("/policy", lambda: choice, _NOBODY)

    async def order(self, model: str, verb: str, gpu: str | None) -> None:
        """Pin, unpin, prefetch or evict a model."""
        where = "" if gpu is None else f"?gpu={quote(gpu, safe='')}"
        await self._insist(f"/models/{quote(model)}/{verb}{where}", dict, _NOBODY)

    async def _said(self, path: str) -> Mapping[str, Any]:
        return await self._insist(path, lambda: None, _NOBODY)
