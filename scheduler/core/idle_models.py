"""Which models are idle, since when, how long they usually are, and by which rule they leave."""

from collections.abc import Mapping

from cache_manager import exits
from cache_manager.exits.exit_rule import ExitRule
from cache_manager.model.ids import ModelId, NodeId, Tier
from cache_manager.model.request_rates import IdleGaps
from scheduler.core.slots import Gpu

_NEVER = "never"


class IdleModels:
    """What the exit rules need to know; nothing is noted while all models stay for ever.

    `fell_idle` are models that are idle on a GPU since the last look, `came_to_rest` those that a
    node reported in its store, and `other_rule` those that leave by another rule from now on.
    """

    def __init__(self, exit_rule: str) -> None:
        self._rule = exits.make(exit_rule)
        self._own: dict[ModelId, str] = {}
        self.active = exit_rule != _NEVER
        self.fell_idle: list[tuple[Gpu, ModelId]] = []
        self.came_to_rest: list[tuple[NodeId, ModelId]] = []
        self.other_rule: set[ModelId] = set()
        self._gaps: dict[ModelId, IdleGaps] = {}
        self._idle_s: dict[ModelId, float] = {}
        self._stored: dict[tuple[NodeId, ModelId], tuple[Tier, float]] = {}

    # -- rules ------------------------------------------------------------------------------------

    def rule(self, model: ModelId) -> ExitRule:
        own = self._own.get(model)
        return self._rule if own is None else exits.make(own)

    def asked_for(self, models: tuple[ModelId, ...], exit_rule: str | None) -> None:
        """A request's function names a rule of its own, or an empty one: that of the cluster."""
        if exit_rule is None or not (exit_rule or self._own):
            return
        for model in models:
            if self._own.get(model, "") == exit_rule:
                continue
            self.other_rule.add(model)
            if exit_rule:
                self._own[model] = exit_rule
                self.active = True
            else:
                del self._own[model]

    def gaps(self, model: ModelId) -> IdleGaps:
        return self._gaps.get(model) or IdleGaps()

    def remember(self, model: ModelId, gaps: IdleGaps) -> None:
        """An earlier leader saw these gaps."""
        self._gaps[model] = gaps

    def forget(self, model: ModelId) -> None:
        """Forget what is remembered of a model that no node has."""
        self._own.pop(model, None)
        self.other_rule.discard(model)
        self._gaps.pop(model, None)
        self._idle_s.pop(model, None)

    # -- on GPUs ----------------------------------------------------------------------------------

    def begun(self, models: tuple[ModelId, ...], now: float) -> None:
        for model in models:
            idle_s = self._idle_s.pop(model, None)
            if idle_s is not None:
                gaps = self._gaps.get(model)
                if gaps is None:
                    gaps = self._gaps[model] = IdleGaps()
                gaps.saw(now - idle_s)

    def ended(self, gpu: Gpu, models: tuple[ModelId, ...], now: float) -> None:
        for model in models:
            resident = gpu.cache.residents.get(model)
            if resident is not None and not resident.users:
                resident.idle_s = self._idle_s[model] = now
                self.fell_idle.append((gpu, model))

    def found(self, gpu: Gpu, model: ModelId) -> None:
        """A node holds a model that this core has not placed there."""
        self.fell_idle.append((gpu, model))

    # -- in the stores of nodes -------------------------------------------------------------------

    def stored(self, node: NodeId, model: ModelId, tier: Tier, now: float) -> None:
        if tier is Tier.ABSENT:
            self._stored.pop((node, model), None)
            return
        self._stored[node, model] = (tier, now)
        if self.active:
            self.came_to_rest.append((node, model))

    def stored_since(self, node: NodeId, model: ModelId) -> tuple[Tier, float] | None:
        return self._stored.get((node, model))

    def node_reports(self, node: NodeId, stored: Mapping[ModelId, Tier], now: float) -> None:
        """A node reports its whole store anew: what it keeps where it was stays in its stage."""
        before = {key[1]: since for key, since in self._stored.items() if key[0] == node}
        for model in before:
            del self._stored[node, model]
        for model, tier in stored.items():
            known_tier, since_s = before.get(model, (tier, now))
            self.stored(node, model, tier, since_s if known_tier is tier else now)
