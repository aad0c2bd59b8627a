"""Forgets the models that are gone, so that what the core remembers has a bound."""

from collections.abc import Mapping
from itertools import islice

from scheduler.core.state.cluster_state import ClusterState
from scheduler.core.state.idle_models import IdleModels
from scheduler.core.state.pending import Pending
from scheduler.core.state.slots import ActiveLease
from scheduler.model.values import LeaseId, RequestId

# Models are forgotten many at a time, once there are this many (1/N) above the bound.
_SLACK_SHARE = 10
# Sets of models that requests named, for each model: they cost little, and nobody needs most.
_BUNDLES_PER_MODEL = 4


class Forgetting:
    """Keeps at most `most_models` profiles, besides those of models that something still needs.

    A model is needed while a node has its weights in any tier, a lease uses it, or a request names
    it. Of the others those that were used most lately stay.
    """

    def __init__(
        self,
        cluster: ClusterState,
        requests: Mapping[RequestId, Pending],
        leases: Mapping[LeaseId, ActiveLease],
        idle: IdleModels,
        most_models: int,
    ) -> None:
        self._cluster = cluster
        self._requests = requests
        self._leases = leases
        self._idle = idle
        self._most_models = most_models
        self._due_models = most_models + most_models // _SLACK_SHARE
        self._due_bundles = _BUNDLES_PER_MODEL * self._due_models

    def forget_when_due(self) -> None:
        """Forget what is too much, if it is worth the time."""
        cluster = self._cluster
        if len(cluster.profiles.known()) > self._due_models:
            self._forget_models()
            # Where too many are needed, the next look is due when there are as many more.
            known = max(self._most_models, len(cluster.profiles.known()))
            self._due_models = known + known // _SLACK_SHARE
        elif cluster.bundle_count > self._due_bundles:
            self._forget_bundles()

    def _forget_models(self) -> None:
        self._forget_bundles()
        cluster = self._cluster
        needed = {model for pending in self._requests.values() for model in pending.models}
        needed |= {model for lease in self._leases.values() for model in lease.models}
        known = cluster.profiles.known()
        # The latest are spared: their node is about to report where it has their weights.
        oldest = islice(known, len(known) - self._most_models // _SLACK_SHARE)
        unneeded = (
            model for model in oldest if model not in needed and not cluster.index.has(model)
        )
        for model in list(islice(unneeded, len(known) - self._most_models)):
            cluster.profiles.forget(model)
            cluster.index.forget(model)
            self._idle.forget(model)

    def _forget_bundles(self) -> None:
        self._cluster.keep_bundles(
            dict.fromkeys(pending.bundle for pending in self._requests.values())
        )
        self._due_bundles = max(self._due_bundles, 2 * self._cluster.bundle_count)
