"""How the readings of the thesis's text change which of its claims are reproduced."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from research.markdown import table
from research.thesis.calibrate import point
from research.thesis.claims import Judged, Verdict, judge
from research.thesis.experiments import Measured, Setting
from research.thesis.printed_figures import Paper
from research.thesis.readings import Readings

IN_USE = "in use"


@dataclass(frozen=True, slots=True)
class ReadVariant:
    """A setting that differs from the one in use by its readings, and the difference in words."""

    label: str
    meaning: str
    setting: Setting


@dataclass(frozen=True, slots=True)
class MeasuredVariant:
    """A variant and its figures."""

    variant: ReadVariant
    measured: Measured


def variants(chosen: Setting) -> list[ReadVariant]:
    """The setting in use, each of its readings changed alone, and the usual ones together."""
    read = chosen.readings
    dispatches = replace(read, counts_dispatches=True)
    changed = [
        (
            "spared",
            "a model that a local queue waits for is evicted last",
            replace(read, spares_waiting=True),
        ),
        (
            "dispatched",
            "frequency counts the requests that a GPU runs, not those it is assigned",
            dispatches,
        ),
        (
            "dispatched, 6 min",
            "the same, and utilisation over the minutes with arrivals",
            replace(dispatches, while_arriving=True),
        ),
        (
            "6 min",
            "utilisation over the minutes with arrivals alone",
            replace(read, while_arriving=True),
        ),
        (
            "soonest",
            "Algorithm 8 takes the busy GPU that is free soonest",
            replace(read, takes_first=False),
        ),
        ("no window", "RRO3 looks at its whole local queue", replace(read, rro3_window=0)),
        ("window 3", "RRO3 looks at three requests", replace(read, rro3_window=3)),
        ("shared", "functions beyond the 22 models share them", replace(read, shares_models=True)),
        (
            "loading too",
            "a GPU that is loading a model holds it, where false misses are counted",
            replace(read, held_when_loaded=False),
        ),
        ("as it runs live", "the readings of the live system, all together", Readings()),
    ]
    found = [ReadVariant(IN_USE, "the setting of this page", chosen)]
    found += [
        ReadVariant(label, meaning, replace(chosen, readings=readings))
        for label, meaning, readings in changed
    ]
    return found


def by_claim(found: Sequence[MeasuredVariant], paper: Paper) -> str:
    """Every claim under every variant, bold where it is reproduced; then what each variant does."""
    judged = [judge(each.measured, paper) for each in found]
    points = [point(each.measured, paper) for each in found]
    head = ["claim", "thesis", *(each.variant.label for each in found)]
    rows = [
        [f"{number}. {_short(same[0])}", same[0].thesis, *(_cell(each) for each in same)]
        for number, same in enumerate(zip(*judged, strict=True), 1)
    ]
    rows.append(["reproduced", str(len(judged[0])), *(str(each.reproduced) for each in points)])
    rows.append(["distance", _NONE, *(f"{each.distance.total:.3f}" for each in points)])
    lines = [
        f"- **{each.variant.label}**: {each.variant.meaning}. {_exchange(judged[0], theirs)}"
        for each, theirs in zip(found[1:], judged[1:], strict=True)
    ]
    return table(head, rows) + "\n\n" + "\n".join(lines)


_NONE = "–"


def _short(claim: Judged) -> str:
    return claim.text.partition(" (")[0]


def _cell(claim: Judged) -> str:
    return f"**{claim.ours}**" if claim.verdict is Verdict.REPRODUCED else claim.ours


def _exchange(in_use: Sequence[Judged], changed: Sequence[Judged]) -> str:
    """Which claims a variant reproduces that the setting in use does not, and the other way."""
    gained, lost = [], []
    for number, (ours, theirs) in enumerate(zip(in_use, changed, strict=True), 1):
        before, after = (each.verdict is Verdict.REPRODUCED for each in (ours, theirs))
        if after and not before:
            gained.append(str(number))
        elif before and not after:
            lost.append(str(number))
    return f"Gains {', '.join(gained) or 'none'}; loses {', '.join(lost) or 'none'}."
