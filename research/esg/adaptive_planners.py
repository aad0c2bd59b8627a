"""Schedulers that plan every stage when its turn comes: ESG, INFless, FaST-GShare."""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from research.esg.applications import Application
from research.esg.fitted_profiles import BATCHES, EsgAssumptions, fitted_profiles, seconds_of
from research.esg.lane_plans import LanePlan, StageCall
from research.esg.node_choice import NodeChoice, NodeRoom, dispatch
from research.esg.path_search import KEPT_PATHS, PathCurve, path_curve
from research.esg.printed import esg_paper
from research.esg.slo_distribution import GROUP_SIZE, SloDistribution, chain, distribute
from scheduler.model.values import Configuration
from scheduler.policies.weighing import Choice, StageProfile

# Deviations of the noise; without any, half of the last stages would end late.
MARGIN = 3.0


def largest_batch(waiting: int) -> int:
    """The largest profiled batch that so many calls fill."""
    return BATCHES[bisect_right(BATCHES, waiting) - 1]


@cache
def distribution(
    application: Application,
    assumed: EsgAssumptions,
    group_size: int = GROUP_SIZE,
    *,
    in_a_row: bool = False,
) -> SloDistribution:
    """How an application's time is divided among its stages, by its dominator tree.

    `in_a_row`: as if they ran one after the other.
    """
    profiles = fitted_profiles(assumed)
    stages = {stage: profiles[stage] for stage in application.stages}
    graph = application.graph
    return distribute(chain(graph.name, graph.order) if in_a_row else graph, stages, group_size)


@cache
def beside_s(
    application: Application, stage: int, assumed: EsgAssumptions, search_s: float
) -> float:
    """The searches and the transfers on the same node, from a stage to the end."""
    table = esg_paper().table3
    each_s = {
        each: search_s + assumed.transfer_s(table[each].input_mb, local=True)
        for each in application.stages
    }
    path = application.heaviest_path(each_s, application.stages[stage])
    return sum(each_s[each] for each in path)


@cache
def curve_of(
    stages: tuple[str, ...],
    batches: tuple[int, ...],
    assumed: EsgAssumptions,
    kept: int = KEPT_PATHS,
    least_vgpus: int = 1,
) -> PathCurve:
    """The answers for these stages, each with at most its batch and at least these vGPUs."""
    profiles = fitted_profiles(assumed)
    return path_curve(
        [
            _limited(profiles[stage], batch, least_vgpus)
            for stage, batch in zip(stages, batches, strict=True)
        ],
        kept,
    )


def _limited(stage: StageProfile, batch: int, least_vgpus: int) -> StageProfile:
    return StageProfile(
        tuple(
            each
            for each in stage.choices
            if each.configuration.batch <= batch and each.configuration.vgpus >= least_vgpus
        )
    )


class AppFunctionLanes:
    """Lanes of ESG: one for each stage of each application, in turn; data locality."""

    @property
    def replans(self) -> bool:
        """The plan that found no room is tried again."""
        return False

    def lane(self, call: StageCall) -> Hashable:
        """An application's calls at one stage."""
        return call.application.name, call.stage

    def arrived(self, call: StageCall, now: float) -> None:
        """Nothing is learnt of arrivals."""

    def urgency(self, waiting: Sequence[StageCall], now: float) -> float:  # noqa: ARG002  # all alike
        """Lanes take turns."""
        return 0.0

    def place(
        self,
        plan: LanePlan,
        function: str,  # noqa: ARG002  # a planner without locality looks at it
        rooms: Sequence[NodeRoom],
        preferred: int,
    ) -> NodeChoice | None:
        """ESG_Dispatch, which all systems with locality share."""
        return dispatch(plan.options, rooms, preferred)


@dataclass(frozen=True, slots=True)
class EsgReading:
    """How points that ESG leaves open are read.

    `later_batches`: a later stage may take at most the calls that wait now; else any batch.
    `cheapest_when_late`: where no path is fast enough the cheapest is taken, not the fastest.
    `quota_as_printed`: a group gets its share of what is left of the whole time, not of the time
    that is left for it and the groups after it.
    `margin`: by how many deviations of the noise a path must be faster than its target; its target
    is without the search and the transfers on the same node.
    `in_a_row`: the time is divided as if no two stages ran at the same time.
    """

    kept: int = KEPT_PATHS
    group_size: int = GROUP_SIZE
    later_batches: bool = True
    cheapest_when_late: bool = False
    quota_as_printed: bool = False
    margin: float = MARGIN
    whole_gpus: bool = False
    single_calls: bool = False
    in_a_row: bool = False


class EsgPlanner(AppFunctionLanes):
    """ESG_1Q before every stage, with ESG_Dispatch."""

    def __init__(
        self, assumed: EsgAssumptions, reading: EsgReading | None = None, name: str = "ESG"
    ) -> None:
        self.name = name
        self._assumed = assumed
        self._reading = reading or EsgReading()

    def plan(self, waiting: Sequence[StageCall], now: float) -> LanePlan:
        """The first configurations of the cheapest paths through the stage's group."""
        first, reading = waiting[0], self._reading
        shared = distribution(
            first.application, self._assumed, reading.group_size, in_a_row=reading.in_a_row
        )
        stages = shared.ahead(first.function)
        target_s = self._target_s(first, shared, stages, now)
        batch = 1 if reading.single_calls else largest_batch(len(waiting))
        later = batch if reading.later_batches else BATCHES[-1]
        batches = (batch, *(later for _ in stages[1:]))
        least_vgpus = esg_paper().vgpus if reading.whole_gpus else 1
        curve = curve_of(stages, batches, self._assumed, reading.kept, least_vgpus)
        late = curve.cheapest_of_all if reading.cheapest_when_late else curve.fastest
        paths = curve.cheapest(target_s) or (late,)
        options = dict.fromkeys(path.choices[0].configuration for path in paths)
        return LanePlan(tuple(options), self._assumed.search_ms / 1e3)

    def _target_s(
        self, first: StageCall, shared: SloDistribution, stages: tuple[str, ...], now: float
    ) -> float:
        assumed = self._assumed
        beside = beside_s(first.application, first.stage, assumed, assumed.search_ms / 1e3)
        left_s = first.due_s - now - beside
        return left_s * self._quota(shared, stages) / (1.0 + self._reading.margin * assumed.noise)

    def _quota(self, shared: SloDistribution, stages: tuple[str, ...]) -> float:
        if self._reading.quota_as_printed:
            (group,) = (each for each in shared.groups if stages[0] in each.stages)
            return group.share
        return shared.quota(stages[0])


class _EnumeratingPlanner(AppFunctionLanes):
    """Enumerates a stage's configurations; its part of the deadline is fixed beforehand."""

    def __init__(self, assumed: EsgAssumptions, name: str) -> None:
        self.name = name
        self._assumed = assumed

    def plan(self, waiting: Sequence[StageCall], now: float) -> LanePlan:  # noqa: ARG002  # fixed
        """All configurations within the stage's time; the fastest if there is none."""
        first = waiting[0]
        shares = mean_time_shares(first.application, self._assumed)
        options = self._options(
            first.function, largest_batch(len(waiting)), first.slo_s * shares[first.stage]
        )
        return LanePlan(options, self._assumed.enumeration_ms / 1e3)

    def _options(self, function: str, batch: int, stage_s: float) -> tuple[Configuration, ...]:
        choices = fitted_profiles(self._assumed)[function].up_to(batch).choices
        within = tuple(each for each in choices if each.time_s <= stage_s)
        return self._preferred(within or choices[:1])

    def _preferred(self, choices: Sequence[Choice]) -> tuple[Configuration, ...]:
        raise NotImplementedError


@cache
def mean_time_shares(application: Application, assumed: EsgAssumptions) -> tuple[float, ...]:
    """Each stage's part of the longest path, by mean service times (GrandSLAm)."""
    profiles = fitted_profiles(assumed)
    means = {
        name: fmean(each.time_s for each in profiles[name].choices) for name in application.stages
    }
    whole = sum(means[name] for name in application.heaviest_path(means))
    return tuple(mean / whole for mean in means.values())


class FastGSharePlanner(_EnumeratingPlanner):
    """The most calls a second for each vGPU; the node that is left with the fewest free vGPUs."""

    def __init__(self, assumed: EsgAssumptions) -> None:
        super().__init__(assumed, "FaST-GShare")
        self._options = cache(self._options)  # type: ignore[method-assign]  # the same for many calls

    def _preferred(self, choices: Sequence[Choice]) -> tuple[Configuration, ...]:
        def rate(choice: Choice) -> tuple[float, float]:
            batch, vcpus, vgpus = choice.configuration
            return -batch / choice.time_s / vgpus, vcpus

        return tuple(each.configuration for each in sorted(choices, key=rate)[:KEPT_PATHS])

    def place(
        self,
        plan: LanePlan,
        function: str,  # noqa: ARG002  # no matter here
        rooms: Sequence[NodeRoom],
        preferred: int,  # noqa: ARG002  # no locality
    ) -> NodeChoice | None:
        """The best fit among warm nodes, else among cold ones."""
        for configuration in plan.options:
            fits = [place for place, room in enumerate(rooms) if room.fits(configuration)]
            if fits:
                best = min(fits, key=lambda place: (not rooms[place].is_warm, rooms[place].vgpus))
                return NodeChoice(configuration, best)
        return None


class InflessPlanner(_EnumeratingPlanner):
    """The most calls a second for the resources taken and for what they leave unused on the node.

    Its efficiency divides the rate by the resources, and by the part of the node's free resources
    that would stay free: a configuration that takes all that is left wins.
    """

    def __init__(self, assumed: EsgAssumptions) -> None:
        super().__init__(assumed, "INFless")
        self._options = cache(self._options)  # type: ignore[method-assign]  # the same for many calls

    def _preferred(self, choices: Sequence[Choice]) -> tuple[Configuration, ...]:
        """The fastest rate for each pair of resources: nothing else can win anywhere."""
        best: dict[tuple[int, int], Choice] = {}
        for choice in choices:
            key = choice.configuration.vcpus, choice.configuration.vgpus
            if key not in best or _rate(choice) > _rate(best[key]):
                best[key] = choice
        return tuple(each.configuration for each in best.values())

    def place(
        self,
        plan: LanePlan,
        function: str,
        rooms: Sequence[NodeRoom],
        preferred: int,  # noqa: ARG002  # no locality
    ) -> NodeChoice | None:
        """The pair of configuration and node with the highest efficiency, on warm nodes first."""
        times = seconds_of(fitted_profiles(self._assumed)[function])
        for warm in (True, False):
            found: tuple[float, Configuration, int] | None = None
            for place in _different([room if room.is_warm == warm else None for room in rooms]):
                for each in plan.options:
                    if not rooms[place].fits(each):
                        continue
                    value = _efficiency(each, times[each], rooms[place])
                    if found is None or value > found[0]:
                        found = value, each, place
            if found is not None:
                return NodeChoice(found[1], found[2])
        return None


# A vCPU counts as this part of a vGPU: so many of each are on a node.
_VCPU_WEIGHT = 7 / 16
# What is left unused counts at least so much, or a perfect fit would be worth infinitely much.
_LEAST_LEFT = 0.05


def _efficiency(configuration: Configuration, time_s: float, room: NodeRoom) -> float:
    taken = _VCPU_WEIGHT * configuration.vcpus + configuration.vgpus
    left = 1.0 - taken / (_VCPU_WEIGHT * room.vcpus + room.vgpus)
    return configuration.batch / time_s / taken / max(left, _LEAST_LEFT)


def _rate(choice: Choice) -> float:
    return choice.configuration.batch / choice.time_s


def _different(rooms: Sequence[NodeRoom | None]) -> list[int]:
    """The first place of each kind of room: equal ones are equally good."""
    first: dict[NodeRoom, int] = {}
    for place, room in enumerate(rooms):
        if room is not None:
            first.setdefault(room, place)
    return list(first.values())
