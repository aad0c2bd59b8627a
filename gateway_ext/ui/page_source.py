"""The page's port: the state of the cluster, and the orders of a person."""

from collections.abc import Mapping
from typing import Protocol

from gateway_ext.ui.page_state import Json, PageState, Point


class Source(Protocol):
    """The cluster, as the page sees it; every failure is raised as a GatewayError."""

    async def look(self) -> PageState:
        """The state now; an unreachable part is marked in it, not raised."""
        ...

    async def point(self) -> Point:
        """A point of the charts: figures of the last seconds; costs far less than a look."""
        ...

    async def decision(self, request: str) -> Json:
        """Why a request was placed where it was, and its outcome."""
        ...

    async def model(self, model: str) -> Json:
        """What a model needs, and its measured times."""
        ...

    async def set_policy(self, name: str, parameters: Mapping[str, float]) -> None:
        """Place by this policy from now on."""
        ...

    async def order(self, model: str, verb: str, gpu: str | None) -> None:
        """Pin, unpin, prefetch or evict a model: on one GPU, or wherever that makes sense."""
        ...

    async def replay(self, letter: int) -> None:
        """Try a dead letter again."""
        ...

    async def discard(self, letter: int) -> None:
        """Delete a dead letter."""
        ...
