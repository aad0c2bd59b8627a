"""Reads the state of earlier leaders from the datastore, for a new leader."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from logging import Logger
from typing import TypeVar

from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId
from scheduler import policies
from scheduler.core.core import Core
from scheduler.model.errors import SchedulerError
from scheduler.model.events import Event, GpuSnapshot, NodeSnapshot, PinAsked
from scheduler.model.profiles import Profile
from scheduler.store.datastore import Store
from scheduler.store.stored_records import (
    ADMINISTRATOR,
    LRU,
    MODELS,
    POLICY,
    GpuOrder,
    PolicyChoice,
    gpu_order,
    is_unused,
    name,
    policy_choice,
    stored_model,
)

_Value = TypeVar("_Value")


@dataclass(slots=True)
class Recovered:
    """Profiles, the order of the latest uses, pinned models, policy."""

    profiles: Mapping[ModelId, Profile] = field(default_factory=dict)
    orders: dict[GpuId, GpuOrder] = field(default_factory=dict)
    policy: PolicyChoice | None = None

    def restore(self, core: Core) -> None:
        for model, model_profile in self.profiles.items():
            core.cluster.profiles.restore(model, model_profile)

    def begin_with(self, configured: PolicyChoice) -> PolicyChoice:
        """The administrator's choice, if there is one; else the configured policy."""
        stored = self.policy
        return stored if stored is not None and stored.chosen_by == ADMINISTRATOR else configured

    def take(self, snapshot: NodeSnapshot) -> list[Event]:
        """A node's first report, with its residents in their recorded order, and recorded pins.

        The manager knows which models are resident; the datastore knows in which order they were
        used. Unrecorded models count as the most recently used, unless the record says that older
        ones are left out. Each GPU is restored only once:
        from then on the core's own order holds.
        """
        pins: list[PinAsked] = []
        gpus: list[GpuSnapshot] = []
        for state in snapshot.gpus:
            order = self.orders.pop(state.gpu.id, _NO_ORDER)
            ranks = {listed.model: rank for rank, listed in enumerate(order.models)}
            pinned = {listed.model for listed in order.models if listed.pinned}
            unlisted = -1 if order.older else len(ranks)
            residents = sorted(state.residents, key=partial(_rank, ranks, unlisted))
            gpus.append(replace(state, residents=tuple(residents)))
            pins += [PinAsked(m, state.gpu.id) for m, _ in residents if m in pinned]
        return [replace(snapshot, gpus=tuple(gpus)), *pins]


def _rank(ranks: Mapping[ModelId, int], unlisted: int, resident: tuple[ModelId, int]) -> int:
    return ranks.get(resident[0], unlisted)


_NO_ORDER = GpuOrder(())


async def recover(store: Store, log: Logger, models_since_unix_s: float = 0.0) -> Recovered:
    """Read all records but bad ones, and models last used before that time."""
    stored = {
        ModelId(model): record
        for model, record in (await sound_records(store, MODELS, stored_model, log)).items()
        if not is_unused(record.used_unix_s, models_since_unix_s)  # the keeper deletes it
    }
    # The core forgets the first ones first, where there are too many.
    by_use = sorted(stored, key=lambda model: (stored[model].used_unix_s, model))
    orders = await sound_records(store, LRU, gpu_order, log)
    choices = await sound_records(store, POLICY, sound_choice, log)
    return Recovered(
        {model: stored[model].profile for model in by_use},
        {GpuId(gpu): order for gpu, order in orders.items()},
        choices.get(""),
    )


async def sound_records(
    store: Store, prefix: str, read: Callable[[bytes], _Value], log: Logger
) -> dict[str, _Value]:
    """The records of one kind by their names, but bad ones, which are logged."""
    records: dict[str, _Value] = {}
    for stored_key, value in (await store.list(prefix)).values.items():
        try:
            records[name(prefix, stored_key)] = read(value)
        except SchedulerError as error:
            log.warning("ignoring %s in the datastore: %s", stored_key, error)
    return records


def sound_choice(value: bytes) -> PolicyChoice:
    """A stored policy that can be made; raises SchedulerError for any other."""
    choice = policy_choice(value)
    policies.make(choice.name, choice.parameters)
    return choice
