"""How much GPU memory each tenant's models take, and whose models leave first if that is shared."""

from collections.abc import Iterable, Mapping

from cache_manager.eviction.eviction_rule import ResidentView
from cache_manager.model.ids import ModelId

_USUAL = 1.0


class MemoryParts:
    """Counts the tenants' bytes; with `weights` each has a part of all memory by its weight.

    Then models of tenants that have more than their part leave before those of others, in the
    order of the eviction rule. Tenants whose weight is not named have the usual one.
    """

    __slots__ = ("_bytes", "_models", "_weight", "memory_bytes", "weights")

    def __init__(self) -> None:
        self.memory_bytes = 0
        self.weights: Mapping[str, float] | None = None
        self._bytes: dict[str, int] = {}
        self._models: dict[str, dict[ModelId, int]] = {}
        self._weight = 0.0

    def share(self, weights: Mapping[str, float] | None) -> None:
        """Share memory by these weights from now on; None: not at all."""
        self.weights = weights
        self._weight = sum(self._weight_of(tenant) for tenant in self._models)

    def models_of(self, tenant: str) -> Iterable[ModelId]:
        """The models of a tenant that some GPU holds."""
        return self._models.get(tenant, _NO_MODELS)

    def came(self, model: ModelId, size_bytes: int) -> None:
        """A copy of a model is on a GPU."""
        tenant = _tenant(model)
        models = self._models.get(tenant)
        if models is None:
            models = self._models[tenant] = {}
            self._bytes[tenant] = 0
            self._weight += self._weight_of(tenant)
        models[model] = models.get(model, 0) + 1
        self._bytes[tenant] += size_bytes

    def left(self, model: ModelId, size_bytes: int) -> None:
        """A copy of a model has left a GPU."""
        tenant = _tenant(model)
        models = self._models[tenant]
        self._bytes[tenant] -= size_bytes
        models[model] -= 1
        if not models[model]:
            del models[model]
        if not models:
            del self._models[tenant], self._bytes[tenant]
            self._weight = self._weight - self._weight_of(tenant) if self._models else 0.0

    def grew(self, model: ModelId, grown_bytes: int) -> None:
        """A copy has another size."""
        self._bytes[_tenant(model)] += grown_bytes

    def over_first(self, order: Iterable[ResidentView]) -> list[ResidentView]:
        """The same residents, those of tenants with more than their part first."""
        first: list[ResidentView] = []
        others: list[ResidentView] = []
        for resident in order:
            (first if self._is_over(_tenant(resident.model)) else others).append(resident)
        return first + others

    def _is_over(self, tenant: str) -> bool:
        part = self._weight_of(tenant) / self._weight if self._weight else 0.0
        return self._bytes.get(tenant, 0) > part * self.memory_bytes

    def _weight_of(self, tenant: str) -> float:
        return _USUAL if self.weights is None else self.weights.get(tenant, _USUAL)


def _tenant(model: ModelId) -> str:
    """Whose a model is; models that name no tenant are together those of one without a name."""
    return model.rpartition("/")[0]


_NO_MODELS: dict[ModelId, int] = {}
