"""One tier of one node: which weights lie in it, how they are used, and which must leave."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cache_manager import eviction
from cache_manager.eviction.eviction_rule import ResidentView
from cache_manager.model.ids import ModelId
from cache_manager.model.request_rates import RequestRates

# The assumed reading speed of a disk before one was measured, and each measurement's weight.
_READ_BYTES_PER_S = 1e9
_MEASURED_SHARE = 0.3
# Beyond the most models, this share (1/N) of them leaves at once: choosing victims takes a sort.
_LEAVING_SHARE = 16
# Rates of this many departed weights are remembered before the faded ones are dropped.
_MOST_RATES = 1_024


class StoredWeights:
    """One model's weights in the tier; `holds` counts their users, `owners` are its tenants."""

    def __init__(
        self, model: ModelId, size_bytes: int, used_s: float, owners: frozenset[str]
    ) -> None:
        self.model = model
        self.bytes = size_bytes
        self.used_s = used_s
        self.owners = owners
        self.holds = 0

    @property
    def kept(self) -> bool:
        """In use: demoted only after all others."""
        return self.holds > 0


@dataclass(frozen=True, slots=True)
class DemotionCandidate:
    """One model's weights that could have left; times and rates as the rule saw them.

    `held` weights are in use: their memory is freed only when their last user releases them.
    `stuck` weights could not be written to the next tier, so that demoting them loses them.
    """

    model: ModelId
    bytes: int
    held: bool
    stuck: bool
    used_s: float
    rate_per_s: float
    reload_s: float


@dataclass(frozen=True, slots=True)
class Demotion:
    """The weights that must leave a tier: `victims` are the first of `candidates`, in order.

    `candidates` names at most `MOST_CANDIDATES` of the weights that stay.
    """

    decided_s: float
    rule: str
    short_bytes: int
    victims: tuple[ModelId, ...]
    candidates: tuple[DemotionCandidate, ...]


MOST_CANDIDATES = 16


class TierIndex:
    """The weights that one tier holds within a budget, and the rule by which they leave.

    Weights are known by their digest, given as a ModelId. Weights that are demoted while in use
    linger: the budget does not count them until `hold` or `touch` makes it count them again.

    The tenants that have weights here share the budget equally: first leave weights whose tenants
    all use more than their share. A tenant alone may use everything.
    """

    def __init__(self, rule: str, budget_bytes: int, most_models: int | None = None) -> None:
        """`rule` is the name of an eviction rule; UnknownRule for any other.

        `most_models` bounds the number of weights, whatever their size; None: no bound.
        """
        self.rule = rule
        self.budget_bytes = budget_bytes
        self.most_models = most_models
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.lingering_bytes = 0
        self._rule = eviction.make(rule)
        self._residents: dict[ModelId, StoredWeights] = {}
        self._lingering: dict[ModelId, StoredWeights] = {}
        self._reserved_by: Counter[str] = Counter()
        self._rates = RequestRates()
        self._read_bytes_per_s = _READ_BYTES_PER_S

    def __contains__(self, model: ModelId) -> bool:
        return model in self._residents or model in self._lingering

    def __len__(self) -> int:
        return len(self._residents) + len(self._lingering)

    def __iter__(self) -> Iterator[ModelId]:
        return iter([*self._residents, *self._lingering])

    # -- what a rule sees -----------------------------------------------------------------------

    @property
    def residents(self) -> Mapping[ModelId, StoredWeights]:
        """The weights that the budget counts, from the least to the most recently used."""
        return self._residents

    def copies(self, model: ModelId) -> int:
        """One: a node's tier does not know what other nodes hold."""
        return 1 if model in self else 0

    def rate(self, model: ModelId, now: float) -> float:
        return self._rates.rate(model, now)

    def load_s(self, model: ModelId) -> float:
        """Seconds to read the weights back from disk, by the reads measured so far."""
        weights = self._residents.get(model)
        return 0.0 if weights is None else weights.bytes / self._read_bytes_per_s

    def run_s(self, model: ModelId) -> float:
        """Unknown here: runs are measured on GPUs."""
        del model
        return 0.0

    # -- room -----------------------------------------------------------------------------------

    @property
    def short_bytes(self) -> int:
        """Bytes above the budget, reservations included."""
        return self.used_bytes + self.reserved_bytes - self.budget_bytes

    @property
    def is_short(self) -> bool:
        """Whether weights must leave: too many bytes, or too many weights whatever their size."""
        return self.short_bytes > 0 or self._has_too_many()

    def room(
        self, now: float, needed_bytes: int = 0, stuck: Container[ModelId] = ()
    ) -> Demotion | None:
        """Which weights leave so that this many more bytes fit; None if the bytes fit already.

        Held weights are named after all others, and `stuck` ones last. The victims may be too few.
        """
        short_bytes = self.short_bytes + needed_bytes
        too_many = self._has_too_many()
        if (short_bytes <= 0 and not too_many) or not self._residents:
            return None
        ordered = sorted(
            self._by_shares(self._rule.order(self, self, now)),
            key=lambda weights: (weights.model in stuck, weights.kept),
        )
        count = self._above_rest() if too_many else 0
        freed_bytes = sum(weights.bytes for weights in ordered[:count])
        while count < len(ordered) and freed_bytes < short_bytes:
            freed_bytes += ordered[count].bytes
            count += 1
        candidates = tuple(
            DemotionCandidate(
                weights.model,
                weights.bytes,
                weights.kept,
                weights.model in stuck,
                weights.used_s,
                self.rate(weights.model, now),
                self.load_s(weights.model),
            )
            for weights in ordered[: count + MOST_CANDIDATES]
        )
        victims = tuple(weights.model for weights in ordered[:count])
        return Demotion(now, self.rule, short_bytes, victims, candidates)

    def still_due(self, candidate: DemotionCandidate) -> bool:
        """Whether room is still lacking and the weights were not used since the decision."""
        weights = self._residents.get(candidate.model)
        if weights is None or (self.short_bytes <= 0 and self._above_rest() <= 0):
            return False
        return (weights.kept, weights.used_s) == (candidate.held, candidate.used_s)

    def reserve(self, size_bytes: int, owner: str = "") -> None:
        """Reserve room for weights that are on their way (or, if negative, free that room)."""
        self.reserved_bytes += size_bytes
        if owner:
            self._reserved_by[owner] += size_bytes
            if self._reserved_by[owner] <= 0:
                del self._reserved_by[owner]

    def may_reserve_bytes(self, owner: str) -> int:
        """How many more bytes this tenant may reserve.

        If there are other tenants, several reservations of one may be half of the budget. For its
        first one half is free even if another tenant has reserved everything, and waits with
        sending it; all reservations together are at most twice the budget.
        """
        left_bytes = self.budget_bytes - self.reserved_bytes
        owners = {tenant for weights in self._residents.values() for tenant in weights.owners}
        if not (owners | self._reserved_by.keys()) - {owner}:
            return left_bytes
        half_bytes = self.budget_bytes // 2
        if owner in self._reserved_by:
            return min(left_bytes, half_bytes - self._reserved_by[owner])
        return min(max(left_bytes, half_bytes), left_bytes + self.budget_bytes)

    def _has_too_many(self) -> bool:
        return self.most_models is not None and len(self._residents) > self.most_models

    def _above_rest(self) -> int:
        if self.most_models is None:
            return 0
        return len(self._residents) - self.most_models + self.most_models // _LEAVING_SHARE

    def _by_shares(self, ordered: Iterable[ResidentView]) -> list[StoredWeights]:
        """Move weights to the front while all their tenants use more than an equal share."""
        stored = [self._residents[resident.model] for resident in ordered]
        sizes, counts = Counter[str](), Counter[str]()
        for weights in stored:
            for owner in weights.owners:
                sizes[owner] += weights.bytes
                counts[owner] += 1
        if len(counts) <= 1:
            return stored
        share_bytes = self.budget_bytes // len(counts)
        share_models = (self.most_models or len(stored)) // len(counts)
        beyond, within = [], []
        for weights in stored:
            if all(sizes[o] > share_bytes or counts[o] > share_models for o in weights.owners):
                beyond.append(weights)
                for owner in weights.owners:
                    sizes[owner] -= weights.bytes
                    counts[owner] -= 1
            else:
                within.append(weights)
        return beyond + within

    # -- changes --------------------------------------------------------------------------------

    def admit(
        self, model: ModelId, size_bytes: int, now: float, owners: frozenset[str] = frozenset()
    ) -> None:
        """Count weights that arrived, as the most recently used."""
        assert model not in self, f"{model} is admitted twice"
        self._residents[model] = StoredWeights(model, size_bytes, now, owners)
        self.used_bytes += size_bytes

    def set_owners(self, model: ModelId, owners: frozenset[str]) -> None:
        """Change the tenants that have these weights; weights that are not here are ignored."""
        weights = self._residents.get(model) or self._lingering.get(model)
        if weights is not None:
            weights.owners = owners

    def touch(self, model: ModelId, now: float) -> None:
        """Make weights the most recently used; lingering weights count again."""
        weights = self._lingering.pop(model, None)
        if weights is None:
            weights = self._residents.pop(model)
        else:
            self.lingering_bytes -= weights.bytes
            self.used_bytes += weights.bytes
        weights.used_s = now
        self._residents[model] = weights

    def hold(self, model: ModelId, now: float) -> None:
        self.touch(model, now)
        self._rates.count_request(model, now)
        if len(self._rates) > 2 * len(self) + _MOST_RATES:
            self._rates.forget_faded(now)
        self._residents[model].holds += 1

    def release(self, model: ModelId, now: float) -> bool:
        """One user less; True if the weights only lingered for that user and have now left."""
        lingering = self._lingering.get(model)
        if lingering is None:
            self._residents[model].holds -= 1
            self.touch(model, now)
            return False
        lingering.holds -= 1
        if lingering.holds:
            return False
        self.remove(model)
        return True

    def demote(self, model: ModelId) -> bool:
        """Stop counting the weights; True if they have left, False if they linger for users."""
        if not self._residents[model].kept:
            self.remove(model)
            return True
        weights = self._residents.pop(model)
        self._lingering[model] = weights
        self.used_bytes -= weights.bytes
        self.lingering_bytes += weights.bytes
        return False

    def remove(self, model: ModelId) -> None:
        """Forget weights that are gone; weights that the tier does not hold are ignored."""
        weights = self._residents.pop(model, None)
        if weights is not None:
            self.used_bytes -= weights.bytes
        lingering = self._lingering.pop(model, None)
        if lingering is not None:
            self.lingering_bytes -= lingering.bytes

    def was_read(self, size_bytes: int, took_s: float) -> None:
        """Correct the reading speed: weights of this size were read from disk in this time."""
        if size_bytes and took_s > 0.0:
            measured = size_bytes / took_s
            self._read_bytes_per_s += _MEASURED_SHARE * (measured - self._read_bytes_per_s)
