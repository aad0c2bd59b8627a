"""The models registered on this node: the tenant, the weights and the functions of each."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from cache_manager.model.ids import ModelId, Tier
from common.gpu_wishes import USUAL, GpuWishes
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.errors import UnknownImage
from gpu_manager.node.change_signal import ChangeSignal
from torch_shim.wire.image_digests import ImageTable

# The number of a digest's 64 digits in a model's id: unique for a tenant, and short in a log.
_DIGITS = 20
# Functions that are remembered of a model, by which people find it; nobody says that one is gone.
_MOST_FUNCTIONS = 100


@dataclass(slots=True)
class TenantModel:
    """One tenant's model; functions of the tenant that have its weights share it.

    `lowest` is the tier to which the scheduler ordered its weights down, until they are needed.
    `wishes` are those of the function that registered it last.
    """

    id: ModelId
    tenant: str
    digest: str
    table: ImageTable
    functions: dict[str, None] = field(default_factory=dict)  # in the order of registration
    reported: Tier = Tier.ABSENT
    lowest: Tier | None = None
    wishes: GpuWishes = USUAL

    @property
    def label(self) -> str:
        """The names of the model's functions, for display."""
        return ", ".join(self.functions)


class Catalogue:
    """Models by id; a model is added when a function sends or proves to have the weights."""

    def __init__(self) -> None:
        self.arrived = ChangeSignal()  # a function sends weights, or proved to have them
        self._models: dict[ModelId, TenantModel] = {}
        self._by_digest: dict[str, dict[ModelId, TenantModel]] = {}
        self._being_sent: Counter[ModelId] = Counter()

    def __iter__(self) -> Iterator[TenantModel]:
        return iter(self._models.values())

    def add(self, owner: FunctionIdentity, digest: str, table: ImageTable) -> TenantModel:
        """Return the owner's model with these weights; add it if it is new."""
        name = model_id(owner.tenant, digest)
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = TenantModel(name, owner.tenant, digest, table)
            self._by_digest.setdefault(digest, {})[name] = model
        model.functions[owner.function] = None
        if len(model.functions) > _MOST_FUNCTIONS:
            del model.functions[next(iter(model.functions))]
        model.lowest = None
        model.wishes = owner.wishes
        self.arrived.notify()
        return model

    def remove(self, model: TenantModel) -> None:
        """Forget a model; it is added again when a function sends its weights again."""
        self._models.pop(model.id, None)
        sharing = self._by_digest.get(model.digest, {})
        sharing.pop(model.id, None)
        if not sharing:
            self._by_digest.pop(model.digest, None)

    def sending_begins(self, tenant: str, digest: str) -> None:
        self._being_sent[model_id(tenant, digest)] += 1
        self.arrived.notify()

    def sending_ends(self, tenant: str, digest: str) -> None:
        name = model_id(tenant, digest)
        self._being_sent[name] -= 1
        if not self._being_sent[name]:
            del self._being_sent[name]
        self.arrived.notify()

    def is_being_sent(self, model: ModelId) -> bool:
        """Whether a function sends the weights of this model, which need not be known yet."""
        return model in self._being_sent

    def with_weights(self, digest: str) -> list[TenantModel]:
        return list(self._by_digest.get(digest, {}).values())

    def get(self, model: ModelId) -> TenantModel:
        try:
            return self._models[model]
        except KeyError as error:
            raise UnknownImage(model) from error

    def of(self, tenant: str, digest: str) -> TenantModel:
        """Return the tenant's model with these weights; raise UnknownImage if there is none."""
        return self.get(model_id(tenant, digest))

    def named(self, text: str) -> list[ModelId]:
        """Return the models that a text may name: prefix of an id or a digest, or a function."""
        if ModelId(text) in self._models:
            return [ModelId(text)]
        return [
            model.id
            for model in self._models.values()
            if (text and (model.id.startswith(text) or model.digest.startswith(text)))
            or text.removeprefix(f"{model.tenant}/") in model.functions
        ]


def model_id(tenant: str, digest: str) -> ModelId:
    return ModelId(f"{tenant}/{digest[:_DIGITS]}")
