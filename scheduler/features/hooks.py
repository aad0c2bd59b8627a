"""What a feature adds to a leader's service: it overrides what it needs, and the rest does nothing.

What it adds to decisions is a layer of the core (`scheduler/core/layer.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from logging import Logger
from typing import Any, ClassVar, Self

from fastapi import APIRouter

from cache_manager.model.ids import ModelId
from common.telemetry.metrics import BoundedNames, Metric, MetricFamily, Values
from scheduler.core.core import Core
from scheduler.model.actions import Dispatch
from scheduler.model.events import Event
from scheduler.settings import Settings
from scheduler.store.datastore import Fence, Store
from scheduler.wire.caller_stream import ToldTerms


@dataclass(frozen=True, slots=True)
class TermParts:
    """The parts of one leader's term that features build upon."""

    settings: Settings
    core: Core
    now_s: Callable[[], float]
    report: Callable[[Event], object]
    store: Store
    fence: Callable[[], Fence | None]  # None without an election
    counts: Mapping[Metric, Values]
    functions: BoundedNames
    log: Logger


@dataclass(frozen=True, slots=True)
class UseShown:
    """A request's own part: of a lease that requests share, an equal one; idle time is not in it.

    `cost` is None without prices.
    """

    gpu_s: float
    gpu_byte_s: float
    cost: float | None


class TermFeature:
    """One feature in one leader's term; the scheduler's service makes it and asks it."""

    # Counted from the start of the process on, and read at a scrape.
    counters: ClassVar[Sequence[Metric]] = ()
    gauges: ClassVar[Sequence[Metric]] = ()

    def __init__(self, term: TermParts) -> None: ...

    @classmethod
    def add_routes(cls, reads: APIRouter, orders: APIRouter, serving: Callable[[], Self]) -> None:
        """Add routes, who may look and who may act; `serving` raises NotLeading on a standby."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Read what earlier leaders kept, before anybody is served, and keep it up to date."""
        return nullcontext()

    def caller_present(self, caller: str) -> AbstractContextManager[None]:
        """A caller has a stream for as long as the context lasts."""
        return nullcontext()

    def told(self, caller: str, message: ToldTerms) -> None:
        """A caller tells functions' terms; BadValue ends its stream."""

    # -- what is shown ----------------------------------------------------------------------------

    def families(self) -> Iterable[MetricFamily]:
        """The values of its gauges."""
        return ()

    def shown(self) -> Mapping[str, Any]:
        """Sections of the page's feed."""
        return {}

    def by_function(self) -> Mapping[str, Mapping[str, Any]]:
        """Sections with one value for each function, of which only changes are sent."""
        return {}

    def users(self, model: ModelId) -> list[str]:
        """The functions that use a model; the first ones, where there are many."""
        return []

    def used(self, uses: Iterable[tuple[Dispatch, float]]) -> UseShown | None:
        """What a request has used by its part, in seconds, of each of these leases."""
        return None
