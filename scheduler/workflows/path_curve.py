"""The K cheapest paths for every target at once: a search made once, then looked up.

What `path_search` finds for one target is a step function of the target. Here all steps are found
in one pass over the stages: a partial path to which K others are at once as fast and as cheap is
part of no answer. A look-up costs about a microsecond, whatever the number of configurations.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.workflows.path_search import KEPT_PATHS, ConfigurationPath, undominated_paths
from scheduler.workflows.stage_profiles import StageProfile, undominated


@dataclass(frozen=True, slots=True)
class PathCurve:
    """Answers to every target: from each time on, the cheapest paths that take no longer."""

    times_s: tuple[float, ...]
    answers: tuple[tuple[ConfigurationPath, ...], ...]

    def cheapest(self, target_s: float) -> tuple[ConfigurationPath, ...]:
        """The cheapest paths that take less than the target, cheapest first; none if none does."""
        place = bisect_left(self.times_s, target_s)
        return self.answers[place - 1] if place else ()

    @property
    def fastest(self) -> ConfigurationPath:
        """What to run where no path takes less than the target (appendix B does not say)."""
        return self.answers[0][0]

    @property
    def cheapest_of_all(self) -> ConfigurationPath:
        """The cheapest path, however long it takes."""
        return self.answers[-1][0]


def path_curve(profiles: Sequence[StageProfile], kept: int = KEPT_PATHS) -> PathCurve:
    """The answers for stages one after the other."""
    paths = [ConfigurationPath(0.0, 0.0, ())]
    for stage in profiles:
        choices = undominated(stage.choices, kept)
        longer = [
            ConfigurationPath(
                path.cost + choice.cost, path.time_s + choice.time_s, (*path.choices, choice)
            )
            for path in paths
            for choice in choices
        ]
        paths = undominated_paths(longer, kept)
    return _answers(paths, kept)


def _answers(paths: Sequence[ConfigurationPath], kept: int) -> PathCurve:
    times: list[float] = []
    answers: list[tuple[ConfigurationPath, ...]] = []
    best: list[ConfigurationPath] = []
    for path in paths:
        best = sorted((*best, path))[:kept]
        times.append(path.time_s)
        answers.append(tuple(best))
    return PathCurve(tuple(times), tuple(answers))
