"""Where the node has each model's weights, and what the scheduler learns of it."""

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from gpu_manager.errors import WeightStoreError
from gpu_manager.node.tenant_models import Catalogue
from gpu_manager.weights.weight_store import WeightStore
from scheduler.api import ModelDemoted, NodeReports


class TierReports:
    """Reports the tiers of models; those whose weights the node has lost are forgotten."""

    def __init__(
        self, node: NodeId, store: WeightStore, catalogue: Catalogue, reports: NodeReports
    ) -> None:
        self._node = node
        self._store = store
        self._catalogue = catalogue
        self._reports = reports

    def tier(self, model: ModelId) -> Tier:
        """Return where the node has a model's weights; ABSENT for models that it does not know."""
        try:
            return self._store.tier(self._catalogue.get(model).digest)
        except WeightStoreError:
            return Tier.ABSENT

    def report(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Report where a model's weights are; `gpu` is one that has lost it, or its process."""
        self._reports.report(ModelDemoted(self._node, gpu, model, self.tier(model)))

    def report_changed(self, *digests: str) -> None:
        """Report the tiers that have changed, of these weights and others.

        Models whose weights this node no longer has are forgotten: their functions send them again.
        """
        for digest in self._store.take_changed().union(digests):
            tier = self._store.tier(digest)
            for model in self._catalogue.with_weights(digest):
                if tier is not model.reported:
                    model.reported = tier
                    self.report(model.id)
                if tier is Tier.ABSENT:
                    self._catalogue.remove(model)
