"""What must hold under any load, judged by the figures of the loads that were offered; pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.overload.offered_loads import CallKind, KindFigures, OfferedLoad

# Of the capacity, that is served without a refusal.
SERVED_FACTOR = 0.8
# Of what is fair, that every kind gets at least.
LEAST_OF_FAIR = 0.7
# A call is let in by an estimate of its wait: waits may be so much longer than the bound.
MOST_OF_BOUND, LONGEST_OF_BOUND = 1.1, 1.5
MOST_REFUSAL_S = 0.5
LEAST_GOODPUT = 0.9


class Requirement(NamedTuple):
    """Something that must hold, whether it does, and by what figure."""

    text: str
    met: bool
    found: str

    def line(self) -> str:
        """A row of the table."""
        return f"| {self.text} | {self.found} | {'yes' if self.met else '**NO**'} |"


def judged(
    kinds: Sequence[CallKind], loads: Sequence[OfferedLoad], most: float, bound_s: float
) -> list[Requirement]:
    """Every requirement; `most` is the capacity, `bound_s` the longest wait and the run."""
    return [
        _nothing_refused_early(kinds, loads),
        _only_answers_and_refusals(loads),
        _nobody_starves(kinds, loads),
        _within_bound(loads, bound_s),
        _longest_within_bound(loads, bound_s),
        _refusals_say_when(loads),
        _refusals_are_quick(loads),
        _goodput_holds(loads, most),
    ]


def fair_counts(served: int, offered: Sequence[int], weights: Sequence[float]) -> list[float]:
    """How many of the calls served would be each kind's: in proportion, none more than it offered.

    What one does not ask for is the others', by their weights.
    """
    found = [0.0] * len(offered)
    left, open_kinds = float(served), [place for place, count in enumerate(offered) if count]
    while open_kinds and left > 0:
        unit = left / sum(weights[place] for place in open_kinds)
        full = [place for place in open_kinds if offered[place] <= unit * weights[place]]
        for place in full or open_kinds:
            found[place] = min(float(offered[place]), unit * weights[place])
        if not full:
            break
        left -= sum(offered[place] for place in full)
        open_kinds = [place for place in open_kinds if place not in full]
    return found


def _nothing_refused_early(kinds: Sequence[CallKind], loads: Sequence[OfferedLoad]) -> Requirement:
    free = {each.name for each in kinds if not each.limited}
    early = [each for each in loads if each.factor <= SERVED_FACTOR]
    counts = [found.refused for each in early for found in each.kinds if found.name in free]
    text = f"nothing is refused up to {SERVED_FACTOR:g} of the capacity"
    return Requirement(text, sum(counts) == 0, f"{sum(counts)} refused")


def _only_answers_and_refusals(loads: Sequence[OfferedLoad]) -> Requirement:
    others = sum(count for each in loads for count in each.others.values())
    named = sorted({status for each in loads for status in each.others})
    found = f"{others} others" + (f" ({', '.join(named)})" if named else "")
    return Requirement("every call is answered 200, 429 or 503", others == 0, found)


def _nobody_starves(kinds: Sequence[CallKind], loads: Sequence[OfferedLoad]) -> Requirement:
    weights = {each.name: each.weight for each in kinds}
    limited = {each.name for each in kinds if each.limited}
    least, whose = 1.0, ""
    for load in loads:
        served = sum(each.answered for each in load.kinds)
        offered = [each.offered for each in load.kinds]
        fair = fair_counts(served, offered, [weights[each.name] for each in load.kinds])
        for each, share in zip(load.kinds, fair, strict=True):
            got = each.answered / share if share else 1.0
            if each.name not in limited and got < least:
                least, whose = got, f" ({each.name} at {load.factor:g})"
    text = f"everybody gets at least {LEAST_OF_FAIR:g} of a fair share"
    return Requirement(text, least >= LEAST_OF_FAIR, f"least {least:.2f}{whose}")


def _within_bound(loads: Sequence[OfferedLoad], bound_s: float) -> Requirement:
    slowest, load = _slowest(loads, lambda found: found.p99_s)
    text = f"99 of 100 answers within {MOST_OF_BOUND:g} of the bound of {bound_s:.2f} s"
    found = f"{slowest.p99_s:.2f} s ({slowest.name} at {load.factor:g})"
    return Requirement(text, slowest.p99_s <= MOST_OF_BOUND * bound_s, found)


def _longest_within_bound(loads: Sequence[OfferedLoad], bound_s: float) -> Requirement:
    slowest, load = _slowest(loads, lambda found: found.longest_s)
    text = f"no answer later than {LONGEST_OF_BOUND:g} of the bound"
    found = f"{slowest.longest_s:.2f} s ({slowest.name} at {load.factor:g})"
    return Requirement(text, slowest.longest_s <= LONGEST_OF_BOUND * bound_s, found)


def _slowest(
    loads: Sequence[OfferedLoad], time_s: Callable[[KindFigures], float]
) -> tuple[KindFigures, OfferedLoad]:
    pairs = [(found, load) for load in loads for found in load.kinds]
    return max(pairs, key=lambda pair: time_s(pair[0]))


def _refusals_say_when(loads: Sequence[OfferedLoad]) -> Requirement:
    hopeless = sum(each.hopeless for each in loads)
    return Requirement("every refusal has a Retry-After", hopeless == 0, f"{hopeless} have none")


def _refusals_are_quick(loads: Sequence[OfferedLoad]) -> Requirement:
    slowest = max(loads, key=lambda load: load.refusal_s)
    text = f"99 of 100 refusals within {MOST_REFUSAL_S:g} s"
    found = f"{slowest.refusal_s:.3f} s (at {slowest.factor:g})"
    return Requirement(text, slowest.refusal_s <= MOST_REFUSAL_S, found)


def _goodput_holds(loads: Sequence[OfferedLoad], most: float) -> Requirement:
    """Where quotas keep GPUs idle the highest rate of answers counts instead of the capacity."""
    highest = max(loads, key=lambda load: load.factor)
    reference = min(most, max(each.answered for each in loads))
    share = highest.answered / reference if reference else 0.0
    text = f"at {highest.factor:g} times the capacity at least {LEAST_GOODPUT:g} of it is answered"
    return Requirement(text, share >= LEAST_GOODPUT, f"{share:.2f}")
