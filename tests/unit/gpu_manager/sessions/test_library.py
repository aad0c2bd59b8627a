"""The models of a node: what is reported about them, at a cost that does not grow with them."""

from cache_manager.model.ids import Tier
from cache_manager.tier_index import TierIndex
from gpu_manager.weights.store import WeightStore
from scheduler.api import ModelDemoted
from tests.kit.virtual_time import virtually
from tests.kit.worlds.gpu_node import world


class CountingStore(WeightStore):
    """Counts the questions about tiers."""

    asked = 0

    def tier(self, digest: str) -> Tier:
        self.asked += 1
        return super().tier(digest)


@virtually
async def test_upload_costs_the_same_however_many_models_there_are() -> None:
    store = CountingStore(TierIndex("lru", 1 << 40))
    async with world(store=store) as it:
        costs = []
        for size_mib in range(1, 60):
            store.asked = 0
            it.add(size_mib)
            costs.append(store.asked)
        assert len(set(costs)) == 1


@virtually
async def test_model_is_forgotten_and_reported_when_its_weights_have_left_the_node() -> None:
    async with world(store=WeightStore(TierIndex("lru", 3 << 20))) as it:
        first = it.add(1)
        it.events.clear()
        second = it.add(3)

        assert [model.id for model in it.library.catalogue] == [second]
        reported = {each.model: each.tier for each in it.seen(ModelDemoted)}
        assert reported == {first: Tier.ABSENT, second: Tier.HOST}
        it.add(1)
        assert first in {model.id for model in it.library.catalogue}
