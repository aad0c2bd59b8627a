"""The parts of a term that never leads: for one feature of the service alone."""

import logging
from collections.abc import Callable, Sequence

from common.telemetry.metrics import Metric
from scheduler.core.core import Core
from scheduler.features.hooks import TermParts
from scheduler.model.events import Event
from scheduler.service.metrics.counting import SchedulerCounters
from scheduler.settings import Settings
from scheduler.store.datastore import Fence, Store
from scheduler.store.memory_store import MemoryStore

LOG = logging.getLogger("tests.term")


def term_parts(
    core: Core,
    now_s: Callable[[], float],
    report: Callable[[Event], object],
    *,
    store: Store | None = None,
    fence: Fence | None = None,
    settings: Settings | None = None,
    counters: Sequence[Metric] = (),
) -> TermParts:
    """Parts with a datastore in memory, and the counters of the feature."""
    meters = SchedulerCounters(more=counters)
    return TermParts(
        settings=settings or Settings(),
        core=core,
        now_s=now_s,
        report=report,
        store=store or MemoryStore(),
        fence=lambda: fence,
        counts=meters.values,
        functions=meters.functions,
        log=LOG,
    )
