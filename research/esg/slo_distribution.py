"""Divides a workflow's time among groups of its stages, by the dominator tree (ESG, section 3.3).

The children of a stage in the dominator tree are its branches and what follows where they join.
Branches that may run at the same time are reduced to one element, as long as the longest of them;
what joins them comes after it, and is no branch. (The paper's text would reduce all children.)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gateway_ext.workflows.graph import Workflow
from research.esg.fitted_profiles import seconds_of
from scheduler.policies.weighing import StageProfile

GROUP_SIZE = 3


class BadProfile(Exception):
    """No choice of configurations can be made of these profiles."""


class SloTooShort(Exception):
    """No choice of configurations ends within the deadline."""

    def __init__(self, workflow: str, slo_s: float, fastest_s: float) -> None:
        super().__init__(
            f"workflow {workflow} cannot end within {slo_s:g} s: the fastest takes {fastest_s:g} s"
        )
        self.workflow = workflow
        self.slo_s = slo_s
        self.fastest_s = fastest_s


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Stages that run one after the other, configured together, and their share of the time."""

    stages: tuple[str, ...]
    share: float


@dataclass(frozen=True, slots=True)
class SloDistribution:
    """The groups of a workflow, and each stage's share of its time."""

    groups: tuple[StageGroup, ...]
    shares: Mapping[str, float]
    rest: Mapping[str, float]

    def ahead(self, stage: str) -> tuple[str, ...]:
        """This stage and those after it in its group."""
        (group,) = (each for each in self.groups if stage in each.stages)
        return group.stages[group.stages.index(stage) :]

    def quota(self, stage: str) -> float:
        """Which part of the time that is left, when this stage begins, its group may still take."""
        mine = sum(self.shares[each] for each in self.ahead(stage))
        return min(mine / self.rest[stage], 1.0)


@dataclass(frozen=True, slots=True)
class _Reduced:
    """Branches that run at the same time, each a series."""

    branches: tuple["_Series", ...]


_Series = tuple[str | _Reduced, ...]


def distribute(
    workflow: Workflow, profiles: Mapping[str, StageProfile], group_size: int = GROUP_SIZE
) -> SloDistribution:
    """Groups of at most so many stages, whose shares along any path sum up to 1 at most."""
    lengths = average_normalised_lengths(profiles)
    children: dict[str | None, list[str]] = {}
    for stage, parent in dominators(workflow).items():
        children.setdefault(parent, []).append(stage)
    whole = _followers(workflow, children, None)
    groups = tuple(_assigned(workflow, whole, 1.0, lengths, group_size))
    shares = {
        stage: group.share * lengths[stage] / sum(lengths[each] for each in group.stages)
        for group in groups
        for stage in group.stages
    }
    return SloDistribution(groups, shares, workflow.longest(shares))


def chain(name: str, stages: Iterable[str]) -> Workflow:
    """A workflow whose stages run one after the other."""
    listed = tuple(stages)
    return Workflow(name, listed, tuple(pairwise(listed)))


def leads(workflow: Workflow, start: str, to: str) -> bool:
    """Whether some path leads from one stage to another."""
    reached = {start}
    for stage in workflow.order:
        if stage not in reached and reached.intersection(workflow.before(stage)):
            reached.add(stage)
    return to in reached


def dominators(workflow: Workflow) -> Mapping[str, str | None]:
    """The immediate dominator of each stage: the last one that every path to it passes.

    None: no stage is passed by all of them, as for an entry.
    """
    found: dict[str, str | None] = {}
    depth: dict[str | None, int] = {None: 0}
    for stage in workflow.order:
        above = workflow.before(stage)
        common: str | None = above[0] if above else None
        for other in above[1:]:
            common = _nearest_common(common, other, found, depth)
        found[stage] = common
        depth[stage] = depth[common] + 1
    return found


def require_slo(workflow: Workflow, profiles: Mapping[str, StageProfile], slo_s: float) -> None:
    """Raise SloTooShort, with the shortest time possible, if no configurations are fast enough."""
    fastest = workflow.longest({stage: each.choices[0].time_s for stage, each in profiles.items()})
    fastest_s = max(fastest.values())
    if fastest_s >= slo_s:
        raise SloTooShort(workflow.name, slo_s, fastest_s)


def average_normalised_lengths(profiles: Mapping[str, StageProfile]) -> Mapping[str, float]:
    """ANL: a stage's part of all stages' time, on average over the configurations of them all."""
    times = {stage: seconds_of(each) for stage, each in profiles.items()}
    first, *others = times.values()
    shared = [each for each in first if all(each in other for other in others)]
    if not shared:
        raise BadProfile("the stages of a workflow have no configuration in common")
    sums = [sum(each[one] for each in times.values()) for one in shared]
    return {
        stage: sum(each[one] / total for one, total in zip(shared, sums, strict=True)) / len(shared)
        for stage, each in times.items()
    }


def _series(workflow: Workflow, children: Mapping[str | None, list[str]], stage: str) -> _Series:
    """A stage and all that it dominates."""
    return (stage, *_followers(workflow, children, stage))


def _followers(
    workflow: Workflow, children: Mapping[str | None, list[str]], parent: str | None
) -> _Series:
    found: list[str | _Reduced] = []
    for level in _levels(workflow, children, children.get(parent, [])):
        branches = tuple(_series(workflow, children, child) for child in level)
        found.extend(branches[0] if len(branches) == 1 else (_Reduced(branches),))
    return tuple(found)


def _levels(
    workflow: Workflow, children: Mapping[str | None, list[str]], siblings: Sequence[str]
) -> list[list[str]]:
    """Children of one stage, those together that wait for none of one another's levels."""
    owner = {each: child for child in siblings for each in _dominated(children, child)}
    level: dict[str, int] = {}
    for child in siblings:  # in the workflow's order: what a sibling waits for was seen before
        above = {owner[each] for each in workflow.before(child) if each in owner}
        level[child] = 1 + max((level[each] for each in above), default=-1)
    return [
        [child for child in siblings if level[child] == height]
        for height in range(max(level.values(), default=-1) + 1)
    ]


def _dominated(children: Mapping[str | None, list[str]], stage: str) -> list[str]:
    found = [stage]
    for each in found:  # grows while it is read
        found.extend(children.get(each, ()))
    return found


def _assigned(
    workflow: Workflow, series: _Series, share: float, lengths: Mapping[str, float], size: int
) -> list[StageGroup]:
    """The share of a series divided among its groups; what was reduced is divided within.

    Stages of one group lead to each other: what follows a stage need not wait for the last one
    that this stage dominates.
    """
    whole = _length(series, lengths)
    groups: list[StageGroup] = []
    run: list[str] = []
    for place, element in enumerate(series):
        if isinstance(element, _Reduced):
            part = share * _length((element,), lengths) / whole
            for branch in element.branches:
                groups.extend(_assigned(workflow, branch, part, lengths, size))
            continue
        run.append(element)
        after = series[place + 1] if place + 1 < len(series) else None
        if len(run) == size or not (isinstance(after, str) and leads(workflow, element, after)):
            groups.append(StageGroup(tuple(run), share * _length(tuple(run), lengths) / whole))
            run = []
    return groups


def _length(series: _Series, lengths: Mapping[str, float]) -> float:
    return sum(
        max(_length(branch, lengths) for branch in element.branches)
        if isinstance(element, _Reduced)
        else lengths[element]
        for element in series
    )


def _nearest_common(
    one: str | None,
    other: str | None,
    parents: Mapping[str, str | None],
    depth: Mapping[str | None, int],
) -> str | None:
    while one != other:
        if depth[one] < depth[other]:
            one, other = other, one
        assert one is not None  # the deeper of two different ones has a parent
        one = parents[one]
    return one
