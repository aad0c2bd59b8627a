"""The models that this node knows: which tenant's weights each of them is, and whose it is."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from cache_manager.model import ModelId, Tier
from gpu_manager.change import Change
from gpu_manager.credentials import Identity
from gpu_manager.errors import UnknownImage
from torch_shim.digests import ImageTable

# Of a digest's 64 digits; enough that a tenant's models never meet, and short in a log.
_DIGITS = 20


@dataclass(slots=True)
class Model:
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
        self.arrived = Change()  # somebody has shown the node weights
        self._models: dict[ModelId, Model] = {}

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def add(self, owner: Identity, digest: str, table: ImageTable) -> Model:
        """The owner's model of these weights."""
        model = self._models.setdefault(
            model_id(owner.tenant, digest),
            Model(model_id(owner.tenant, digest), owner.tenant, digest, table),
        )
        model.functions[owner.function] = None
        self.arrived.happened()
        return model

    def get(self, model: ModelId) -> Model:
        """The model of this id, or UnknownImage."""
        try:
            return self._models[model]
        except KeyError as error:
            raise UnknownImage(model) from error

    def of(self, tenant: str, digest: str) -> Model:
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
