"""The stored weights of models that step down, and reports of where they are.

When a model steps down is the scheduler's decision, and does not belong here.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from common.tasks import BackgroundTasks
from gpu_manager.errors import UnknownImage, WeightStoreError
from gpu_manager.node.tenant_models import Catalogue, TenantModel
from gpu_manager.weights.store import WeightStore
from scheduler.api import ModelDemoted, NodeReports

log = logging.getLogger(__name__)


@dataclass(eq=False)
class StoredWeights:
    """Moves weights down, unless a model needs them, and reports in which tier they are.

    Models of several tenants may share weights: those move as far as all of the models may. Models
    whose weights the node has lost are forgotten.
    """

    node: NodeId
    store: WeightStore
    catalogue: Catalogue
    reports: NodeReports

    def __post_init__(self) -> None:
        self._tasks = BackgroundTasks(log, "moving stored weights down")
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by digest, the last one

    def tier(self, model: ModelId) -> Tier:
        """Return where the node has a model's weights; ABSENT for models that it does not know."""
        try:
            return self.store.tier(self.catalogue.get(model).digest)
        except WeightStoreError:
            return Tier.ABSENT

    def report(self, model: ModelId, gpu: GpuId | None = None) -> None:
        """Report where a model's weights are; `gpu` is one that has lost it, or its process."""
        self.reports.report(ModelDemoted(self.node, gpu, model, self.tier(model)))

    def report_changed(self, *digests: str) -> None:
        """Report the tiers that have changed, of these weights and others.

        Models whose weights this node no longer has are forgotten: their functions send them again.
        """
        for digest in self.store.take_changed().union(digests):
            tier = self.store.tier(digest)
            for model in self.catalogue.with_weights(digest):
                if tier is not model.reported:
                    model.reported = tier
                    self.report(model.id)
                if tier is Tier.ABSENT:
                    self.catalogue.remove(model)

    def step_down(self, name: ModelId, tier: Tier, on_a_gpu: Callable[[ModelId], bool]) -> None:
        """Move a model's weights down to this tier; orders about the same weights take turns.

        `on_a_gpu` says whether a model is loaded or being loaded.
        """
        try:
            model = self.catalogue.get(name)
        except UnknownImage:
            self.report(name)
            return
        model.lowest = tier
        before = self._under_way.get(model.digest)
        task = self._tasks.start(self._step(model, before, on_a_gpu))
        self._under_way[model.digest] = task
        task.add_done_callback(lambda _: self._forget(model.digest, task))

    def need(self, name: ModelId) -> asyncio.Task[None] | None:
        """Keep a model's weights from now on; return the step that is under way, if any."""
        try:
            model = self.catalogue.get(name)
        except UnknownImage:
            return None
        model.lowest = None
        return self._under_way.get(model.digest)

    async def _step(
        self,
        model: TenantModel,
        before: asyncio.Task[None] | None,
        on_a_gpu: Callable[[ModelId], bool],
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        reported = model.reported
        try:
            await self._move(model.digest, on_a_gpu)
        finally:
            self.report_changed(model.digest)
            if model.reported is reported:
                self.report(model.id)

    async def _move(self, digest: str, on_a_gpu: Callable[[ModelId], bool]) -> None:
        sharing = self.catalogue.with_weights(digest)
        ordered = [model.lowest for model in sharing if model.lowest is not None]
        is_on_a_gpu = any(on_a_gpu(model.id) for model in sharing)
        if ordered and len(ordered) == len(sharing) and not is_on_a_gpu:
            await asyncio.to_thread(
                self.store.step_down,
                digest,
                min(ordered),
                lambda: all(model.lowest is not None for model in sharing),  # still, in the thread
            )

    def _forget(self, digest: str, task: asyncio.Task[None]) -> None:
        if self._under_way.get(digest) is task:
            del self._under_way[digest]
