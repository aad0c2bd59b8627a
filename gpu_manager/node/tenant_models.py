"""The models that this node knows: the tenant, the weights and the functions of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from cache_manager.model.ids import ModelId, Tier
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.errors import UnknownImage
from gpu_manager.node.change_signal import Change
from torch_shim.wire.image_digests import ImageTable

# Of a digest's 64 digits; enough that a tenant's models never meet, and short in a log.
_DIGITS = 20


@dataclass(slots=True)
class TenantModel:
    """One tenant's model; functions of the tenant that have its weights share it."""

    id: ModelId
    tenant: str
    digest: str
    table: ImageTable
    functions: dict[str, None] = field(default_factory=dict)  # in the order in which they came
    reported: Tier = Tier.ABSENT

    @property
    def label(self) -> str:
        """What a person knows it by."""
        return ", ".join(self.functions)


class Catalogue:
    """Models by id; one is added when a function shows that it has the weights."""

    def __init__(self) -> None:
        self.arrived = Change()  # a function has sent weights or proved to have them
        self._models: dict[ModelId, TenantModel] = {}

    def __iter__(self) -> Iterator[TenantModel]:
        return iter(self._models.values())

    def add(self, owner: FunctionIdentity, digest: str, table: ImageTable) -> TenantModel:
        """The owner's model of these weights."""
        model = self._models.setdefault(
            model_id(owner.tenant, digest),
            TenantModel(model_id(owner.tenant, digest), owner.tenant, digest, table),
        )
        model.functions[owner.function] = None
        self.arrived.happened()
        return model

    def get(self, model: ModelId) -> TenantModel:
        """The model of this id, or UnknownImage."""
        try:
            return self._models[model]
        except KeyError as error:
            raise UnknownImage(model) from error

    def of(self, tenant: str, digest: str) -> TenantModel:
        """The tenant's model of these weights, or UnknownImage."""
        return self.get(model_id(tenant, digest))

    def named(self, text: str) -> list[ModelId]:
        """The models that a person may mean: an id or its beginning, a digest's, or a function."""
        if ModelId(text) in self._models:
            return [ModelId(text)]
        return [
            model.id
            for model in self._models.values()
            if (text and (model.id.startswith(text) or model.digest.startswith(text)))
            or text in model.functions
        ]


def model_id(tenant: str, digest: str) -> ModelId:
    """What the scheduler calls a tenant's model."""
    return ModelId(f"{tenant}/{digest[:_DIGITS]}")
