"""Logs what happened and what was decided, and counts it."""

from collections import Counter
from logging import DEBUG, INFO, WARNING, Logger

from scheduler.model import events
from scheduler.model.actions import (
    Action,
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    EnqueueLocally,
    Finish,
    Prepare,
    Recall,
    Refuse,
    Taken,
)
from scheduler.model.values import LeaseId, RequestOutcome
from scheduler.wire.cluster_status import DecisionCounts

# Faults and administrators' orders are rare and logged; all other events come with every request.
_LEVELS: dict[type, int] = {
    events.GpuJoined: INFO,
    events.GpuDraining: INFO,
    events.GpuLost: WARNING,
    events.NodeSilent: WARNING,
    events.NodeHeard: INFO,
    events.MemoryPressure: WARNING,
    events.LoadFailed: WARNING,
    events.RunFailed: WARNING,
    events.PinAsked: INFO,
    events.UnpinAsked: INFO,
    events.PrefetchAsked: INFO,
    events.EvictAsked: INFO,
    events.PolicySet: INFO,
    events.LeaseIdsRaised: INFO,
}


class DecisionLog:
    """The log and the counters of one driver."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._latest_lease = LeaseId(0)
        self._counts: Counter[str] = Counter()
        self._finished: Counter[RequestOutcome] = Counter()

    def happened(self, event: events.Event) -> None:
        level = _LEVELS.get(type(event), DEBUG)
        if self._log.isEnabledFor(level):
            self._log.log(level, "%s", event)

    def decided(self, action: Action) -> None:
        """One action is about to be carried out."""
        if isinstance(action, Dispatch):
            self._dispatched(action)
        elif isinstance(action, Prepare):
            self._prepares(action)
        elif isinstance(action, Demote):
            self._counts["evictions"] += 1
            self._log.info("%s leaves %s: %s", action.model, action.gpu, action.reason)
        elif isinstance(action, EndContext):
            text = "the empty process that %s left on %s ends: %s"
            self._log.info(text, action.model, action.gpu, action.reason)
        elif isinstance(action, DemoteStored):
            tier = action.tier.name.lower()
            text = "the weights of %s on node %s are to be %s: %s"
            self._log.info(text, action.model, action.node, tier, action.reason)
        elif isinstance(action, Finish):
            self._finished[action.outcome] += 1
            about = {"request": action.request}
            text = "request %s: %s %s"
            self._log.debug(text, action.request, action.outcome, action.reason, extra=about)
        elif isinstance(action, EnqueueLocally):
            about = {"request": action.request}
            text = "request %s waits for %s: %s"
            self._log.debug(text, action.request, action.slot, action.rule, extra=about)
            self._explain(action)
        elif isinstance(action, Taken):
            self._counts["hits"] += 1
            request, lease = action.request.id, action.dispatch.lease
            text, about = "request %s used lease %d, which its caller keeps", {"request": request}
            self._log.debug(text, request, lease, extra=about | {"lease": lease})
        elif isinstance(action, Recall):
            self._log.debug("lease %d is recalled", action.lease, extra={"lease": action.lease})
        elif isinstance(action, Refuse):
            self._counts["refusals"] += 1
            self._log.warning("refused %.500s: %s", action.event, action.reason)

    def counts(self) -> DecisionCounts:
        return DecisionCounts(**self._counts, finished=dict(self._finished))

    def _dispatched(self, action: Dispatch) -> None:
        if action.lease <= self._latest_lease:  # repeated for a caller that asked again
            return
        self._latest_lease = action.lease
        self._counts["hits" if action.hit else "misses"] += len(action.requests)
        if action.held_elsewhere:
            self._counts["false_misses"] += len(action.requests)
        self._log.debug(
            "requests %s: lease %d on %s, %s: %s",
            action.requests,
            action.lease,
            action.slot,
            "hit" if action.hit else "miss",
            action.rule,
            # The placement may be for another request than the one that this event is about.
            extra={"request": ",".join(action.requests), "lease": action.lease},
        )
        self._explain(action)

    def _prepares(self, action: Prepare) -> None:
        self._counts["evictions"] += len(action.victims)
        self._counts["prefetches"] += action.prefetch
        level = INFO if action.prefetch else DEBUG
        loads = [load.model for load in action.loads]
        self._log.log(level, "%s loads %s, evicts %s", action.gpu, loads, action.victims)

    def _explain(self, action: Dispatch | EnqueueLocally) -> None:
        if action.explanation is not None:
            self._log.debug("%s", action.explanation)
