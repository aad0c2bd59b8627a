"""Every model's known size and times: declared, measured, or a default."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from cache_manager.model.ids import ModelId, Tier
from cache_manager.model.request_rates import IdleGaps
from scheduler.model.values import ANY_GPU_TYPE, Configuration, CoreSettings, ModelSpec

# Run times kept of one model, by batch and GPU type, and as many by configuration: a caller may
# send every batch that there is.
MOST_RUNS = 64
# Features kept of one model.
MOST_FEATURES = 64


@dataclass(slots=True, eq=False)
class Profile:
    """One model's memory, load seconds by source tier and run seconds by batch and GPU type.

    `configured_s` holds run seconds by configuration and GPU type, as they were measured. The runs
    whose times are `stand_ins` all had neighbours. `gaps` are those between its uses, if anybody
    counts them.
    """

    memory_bytes: int
    measured_bytes: int = 0
    measured_loads: set[Tier] = field(default_factory=set)
    measured_runs: set[tuple[int, str]] = field(default_factory=set)
    stand_ins: set[tuple[int, str]] = field(default_factory=set)
    load_s: dict[Tier, float] = field(default_factory=dict)
    run_s: dict[tuple[int, str], float] = field(default_factory=dict)
    configured_s: dict[tuple[Configuration, str], float] = field(default_factory=dict)
    features: dict[str, float] = field(default_factory=dict)
    usual_run_s: float | None = None
    weights_bytes: int = 0
    gaps: IdleGaps = field(default_factory=IdleGaps)

    def has_room(self, key: tuple[int, str]) -> bool:
        """Whether a run's time can be kept without the loss of another."""
        return key in self.run_s or len(self.run_s) < MOST_RUNS

    def keep_run(self, key: tuple[int, str], run_s: float) -> None:
        """Keep a run's time as the latest; beyond the bound the oldest one goes.

        The time of a batch that is not known is scaled from the nearest known one, so that little
        is lost with one of many.
        """
        self.run_s.pop(key, None)
        self.run_s[key] = run_s
        if len(self.run_s) > MOST_RUNS:
            oldest = next(iter(self.run_s))
            del self.run_s[oldest]
            self.measured_runs.discard(oldest)
            self.stand_ins.discard(oldest)

    def keep_configured(self, key: tuple[Configuration, str], run_s: float) -> None:
        """Keep the time of a run in a configuration as the latest; beyond the bound one goes."""
        self.configured_s.pop(key, None)
        self.configured_s[key] = run_s
        if len(self.configured_s) > MOST_RUNS:
            del self.configured_s[next(iter(self.configured_s))]


class Profiles:
    """The profiles of all models; every report corrects one (exponentially weighted)."""

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        # Every model that was declared, requested or reported, the least recently used first. A
        # model that is asked for here has a profile from then on, at first with the defaults.
        self.known = defaultdict[ModelId, Profile](partial(Profile, settings.default_memory_bytes))
        self._changed: set[ModelId] = set()
        self._predict: Slowdown = _none_slows
        self.forgotten = 0

    def predict_slowdowns(self, predict: "Slowdown") -> None:
        """Ask this from now on how long models run beside others; without it, as long as alone."""
        self._predict = predict

    def used(self, model: ModelId) -> None:
        profile = self.known.pop(model, None)
        if profile is not None:
            self.known[model] = profile

    def forget(self, model: ModelId) -> None:
        """Forget a model that nothing needs; `forgotten` counts them."""
        self.forgotten += 1
        del self.known[model]
        self._changed.discard(model)

    def take_changed(self) -> set[ModelId]:
        """The models whose profiles have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def restore(self, model: ModelId, profile: Profile) -> None:
        """Take over an earlier scheduler's profile, unless more is known already."""
        self.known.setdefault(model, profile)

    def declare(self, spec: ModelSpec) -> None:
        """Take over a declaration; measured values stay."""
        self._changed.add(spec.id)
        profile = self.known[spec.id]
        self.used(spec.id)
        if spec.weights_bytes:
            profile.weights_bytes = spec.weights_bytes
        if spec.memory_bytes is not None and not profile.measured_bytes:
            profile.memory_bytes = spec.memory_bytes
        for tier, load_s in spec.load_s.items():
            if tier not in profile.measured_loads:
                profile.load_s[tier] = load_s
        for batch, gpu_type, run_s in spec.run_s:
            key = batch, gpu_type
            if key not in profile.measured_runs and profile.has_room(key):
                profile.stand_ins.discard(key)
                profile.keep_run(key, run_s)
        if spec.run_s and not profile.measured_runs:
            profile.usual_run_s = min(spec.run_s)[-1]  # of the smallest batch
        features = {**profile.features, **spec.features}
        profile.features = dict(islice(features.items(), MOST_FEATURES))

    # -- questions ------------------------------------------------------------------------------

    def weights_bytes(self, model: ModelId) -> int:
        """The size of the stored image; while it is unknown, what the model needs on a GPU."""
        profile = self.known.get(model)  # to ask for it does not make a model known
        if profile is None:
            return self._settings.default_memory_bytes
        return profile.weights_bytes or profile.memory_bytes

    def load_s(self, model: ModelId, source: Tier) -> float:
        """Seconds to load from this tier; if unknown, from the next slower known tier."""
        loads_s = self.known[model].load_s
        if not loads_s:
            return self._settings.default_load_s
        exact = loads_s.get(source)
        if exact is not None:
            return exact
        slower = [tier for tier in loads_s if tier > source]
        return loads_s[min(slower)] if slower else loads_s[max(loads_s)]

    def run_s(self, model: ModelId, batch: int, gpu_type: str) -> float:
        """Seconds of one run; if unknown, scaled from the nearest known run."""
        runs_s = self.known[model].run_s
        exact = runs_s.get((batch, gpu_type))
        return exact if exact is not None else self._nearest_run_s(runs_s, batch, gpu_type)

    def times_s(self, model: ModelId, source: Tier) -> tuple[float, float]:
        """Seconds to load the model from this tier, and those of a run."""
        return self.load_s(model, source), self.usual_run_s(model)

    def usual_run_s(self, model: ModelId) -> float:
        """Seconds of a run as last reported, for any batch and GPU."""
        usual = self.known[model].usual_run_s
        return self._settings.default_run_s if usual is None else usual

    def usual_runs_s(self, models: tuple[ModelId, ...]) -> float:
        total_s = 0.0
        for model in models:
            total_s += self.usual_run_s(model)
        return total_s

    def all_loads_s(self, models: tuple[ModelId, ...], source: Tier) -> float:
        total_s = 0.0
        for model in models:
            total_s += self.load_s(model, source)
        return total_s

    def alone_s(self, model: ModelId, batch: int, gpu_type: str) -> float | None:
        """Seconds of one run that has its GPU to itself, as measured, else declared; or None."""
        profile = self.known.get(model)
        if profile is None:
            return None
        for key in ((batch, gpu_type), (batch, ANY_GPU_TYPE)):
            run_s = profile.run_s.get(key)
            if run_s is not None and key not in profile.stand_ins:
                return run_s
        return None

    def _nearest_run_s(
        self, known: Mapping[tuple[int, str], float], batch: int, gpu_type: str
    ) -> float:
        if not known:
            return self._settings.default_run_s
        same_type = [key for key in known if key[1] == gpu_type]
        any_type = [key for key in known if key[1] == ANY_GPU_TYPE]
        nearest = min(
            same_type or any_type or list(known), key=lambda key: (abs(key[0] - batch), key)
        )
        return known[nearest] * max(1.0, batch / nearest[0])

    # -- the one estimate of how long a request takes on a slot ---------------------------------
    #
    # Every placement decision reads its seconds here: what a policy compares, what a lease is
    # expected to take, what a local queue adds up, and what an explanation shows. Interference
    # between models that share a GPU therefore belongs into `runs_s` alone.

    def runs_s(
        self,
        models: tuple[ModelId, ...],
        batch: int,
        gpu_type: str,
        neighbours: tuple[tuple[ModelId, ...], ...],
    ) -> float:
        """The expected seconds to run all models once, one by one, on a GPU of this type.

        `neighbours` are the models of each lease that would run beside this one on the same GPU.
        """
        total_s = 0.0
        for model in models:
            alone_s = self.run_s(model, batch, gpu_type)
            if neighbours:
                alone_s *= self._slowdown(model, gpu_type, neighbours)
            total_s += alone_s
        return total_s

    def configured_runs_s(
        self, models: tuple[ModelId, ...], configuration: Configuration, gpu_type: str
    ) -> float:
        """The expected seconds to run all models once, one by one, in this configuration.

        Its batch is that of the run. Times that were not measured are those of the largest portion
        of the batch on one part of the GPU.
        """
        portion = -(-configuration.batch // max(1, configuration.vgpus))
        total_s = 0.0
        for model in models:
            exact = self.known[model].configured_s.get((configuration, gpu_type))
            total_s += self.run_s(model, portion, gpu_type) if exact is None else exact
        return total_s

    def slowdown(
        self,
        models: tuple[ModelId, ...],
        gpu_type: str,
        neighbours: tuple[tuple[ModelId, ...], ...],
    ) -> float:
        """How many times as long the models run beside these leases; 1 alone, or if unknown."""
        if not neighbours:
            return 1.0
        alone_s = self.runs_s(models, 1, gpu_type, ())
        return self.runs_s(models, 1, gpu_type, neighbours) / alone_s if alone_s else 1.0

    def _slowdown(
        self, model: ModelId, gpu_type: str, neighbours: tuple[tuple[ModelId, ...], ...]
    ) -> float:
        """Of one model: it takes turns with itself, and the rest is as it was learned."""
        turns = 0.0
        others: list[tuple[ModelId, ...]] = []
        for lease in neighbours:
            if model in lease:
                turns += 1.0 / len(lease)
            else:
                others.append(lease)
        predicted = self._predict(model, gpu_type, others) if others else 1.0
        return predicted + turns

    # -- reports --------------------------------------------------------------------------------

    def report_load(self, model: ModelId, source: Tier, load_s: float) -> None:
        self._changed.add(model)
        profile = self.known[model]
        profile.measured_loads.add(source)
        times = profile.load_s
        times[source] = self._blend(times.get(source), load_s)

    def report_run(
        self, model: ModelId, batch: int, gpu_type: str, run_s: float, together: int = 1
    ) -> None:
        """Of calls that ran `together` the time is that of a larger batch, and usual in parts."""
        self._changed.add(model)
        profile = self.known[model]
        times, whole_s = profile.run_s, run_s * together
        key = (batch * together, gpu_type)
        before_s = times.get(key)
        if before_s is None:
            before_s = times.get((batch * together, ANY_GPU_TYPE))
        blended_s = whole_s if before_s == whole_s else self._blend(before_s, whole_s)
        if key in profile.stand_ins:
            profile.stand_ins.remove(key)
            blended_s = whole_s
        profile.measured_runs.add(key)
        profile.keep_run(key, blended_s)
        profile.usual_run_s = blended_s / together

    def report_beside(
        self, model: ModelId, batch: int, gpu_type: str, run_s: float, together: int = 1
    ) -> None:
        """A run had neighbours: it stands in for one alone while the time of none is known."""
        profile, key = self.known[model], (batch * together, gpu_type)
        if self.alone_s(model, batch * together, gpu_type) is not None:
            return
        self._changed.add(model)
        profile.stand_ins.add(key)
        profile.keep_run(key, self._blend(profile.run_s.get(key), run_s * together))
        if profile.usual_run_s is None:
            profile.usual_run_s = run_s

    def report_configured(
        self, model: ModelId, configuration: Configuration, gpu_type: str, run_s: float
    ) -> None:
        """A run in this configuration was measured; beyond the bound the oldest is forgotten."""
        self._changed.add(model)
        profile, key = self.known[model], (configuration, gpu_type)
        profile.keep_configured(key, self._blend(profile.configured_s.get(key), run_s))

    def report_memory(self, model: ModelId, peak_bytes: int) -> bool:
        """Take over a measured peak: the first replaces the declaration; True if it changed."""
        profile = self.known[model]
        needed = max(profile.measured_bytes, peak_bytes)
        changed = needed != profile.memory_bytes
        if needed != profile.measured_bytes:
            self._changed.add(model)
        profile.measured_bytes = profile.memory_bytes = needed
        return changed

    def _blend(self, known: float | None, measured: float) -> float:
        if known is None:
            return measured
        return known + self._settings.report_weight * (measured - known)


# How many times as long a model's run takes on this type of GPU beside leases of other models.
Slowdown = Callable[[ModelId, str, Sequence[tuple[ModelId, ...]]], float]


def _none_slows(*_: object) -> float:
    return 1.0
