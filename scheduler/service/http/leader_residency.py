"""The cache manager of the scheduler that leads, as its routes see it."""

from collections.abc import Callable

from cache_manager.model.ids import GpuId, ModelId
from cache_manager.routes import ConfiguredRun, Holder, ModelShown
from scheduler.estimates.profiles import Profile
from scheduler.model.errors import MalformedRequest, UnknownModel, UnknownName
from scheduler.service.leadership.term import Office
from scheduler.service.survey import hosting_of
from scheduler.service.views.cluster_report import model_rests


class LeaderResidency:
    """Reads and orders the cache of the present leader."""

    def __init__(self, office: Callable[[], Office]) -> None:
        self._office = office

    def models(self) -> list[ModelShown]:
        """Every model that was declared, requested or reported."""
        office = self._office()
        now_s = office.clock.now_s()
        profiles = office.core.cluster.profiles.known()
        return [_model(office, model, profiles[model], now_s) for model in sorted(profiles)]

    def model(self, model: ModelId) -> ModelShown:
        office = self._office()
        profile = office.core.cluster.profiles.known()[model]
        return _model(office, model, profile, office.clock.now_s())

    def named(self, name: str) -> ModelId:
        """Find a model by its id, the beginning of the id or of its last part, or a function."""
        office = self._office()
        profiles = office.core.cluster.profiles.known()
        if name in profiles:
            return ModelId(name)
        matches = [
            model
            for model in (profiles if name else ())
            if model.startswith(name)
            or model.rpartition("/")[2].startswith(name)
            or any(name in (user, user.rpartition("/")[2]) for user in office.bill.users(model))
        ]
        if not matches:
            raise UnknownModel(name)
        if len(matches) > 1:
            raise MalformedRequest(f"{name!r} may be any of {', '.join(sorted(matches))}")
        return matches[0]

    async def pin(self, model: ModelId, gpu: GpuId | None) -> None:
        await self._on(gpu).driver.pin(model, gpu)

    async def unpin(self, model: ModelId, gpu: GpuId | None) -> None:
        await self._on(gpu).driver.unpin(model, gpu)

    async def prefetch(self, model: ModelId, gpu: GpuId | None) -> None:
        await self._on(gpu).driver.prefetch(model, gpu)

    async def evict(self, model: ModelId, gpu: GpuId | None) -> None:
        await self._on(gpu).driver.evict(model, gpu)

    def _on(self, gpu: GpuId | None) -> Office:
        office = self._office()
        if gpu is not None and gpu not in office.core.cluster.gpus:
            raise UnknownName("GPU", gpu)
        return office


def _model(office: Office, model: ModelId, profile: Profile, now_s: float) -> ModelShown:
    core = office.core
    index = core.cluster.index
    residents = ((cache, cache.residents[model]) for cache in index.holders(model).values())
    lanes = (core.cluster.waiting.lanes.get(b) for b in core.cluster.bundles_of(model))
    return ModelShown(
        model=model,
        memory_bytes=profile.memory_bytes,
        load_s={tier.name.lower(): seconds for tier, seconds in sorted(profile.load_s.items())},
        run_s={f"{batch} on {kind}": s for (batch, kind), s in sorted(profile.run_s.items())},
        configured=[
            ConfiguredRun(*configuration, gpu_type, run_s)
            for (configuration, gpu_type), run_s in sorted(profile.configured_s.items())
        ],
        rate=index.rate(model, now_s),
        waiting=sum(lane.waiting for lane in lanes if lane is not None),
        holders=[
            Holder(
                gpu=cache.id,
                memory_bytes=resident.bytes,
                used_ago_s=now_s - resident.used_s,
                leases=resident.users,
                waiting=resident.waiters,
                pinned=resident.pinned,
                **hosting_of(core.cluster.gpus[cache.id], model)._asdict(),
            )
            for cache, resident in residents
        ],
        rests=model_rests(core, (model,), now_s),
        features=profile.features,
        functions=office.bill.users(model),
    )
