"""The generated parts of docs/evaluation.md, by name: tables, readings, verdicts and pictures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from research.markdown import table
from research.thesis import calibrate
from research.thesis.calibrate import Point, best, distance
from research.thesis.claims import Check, Judged, Verdict, judge, minimum, orders
from research.thesis.experiments import Measured, Setting
from research.thesis.printed_figures import SWEEP_WORKING_SET, Paper
from research.thesis.readings import Readings

_NONE = "–"


def checks(found: Sequence[Check], title: str = "must hold at working set 35") -> str:
    """The requirements with their figures."""
    rows = [[each.text, each.thesis, each.ours, "yes" if each.met else "**no**"] for each in found]
    return table([title, "thesis", "simulated", "holds"], rows)


def claims(judged: Sequence[Judged]) -> str:
    """The claims with their verdicts."""
    rows = [
        [f"{number}. {each.text}", each.thesis, each.ours, each.difference, str(each.verdict)]
        for number, each in enumerate(judged, 1)
    ]
    return table(["claim", "thesis", "simulated", "difference", "verdict"], rows)


def metric(measured: Measured, paper: Paper, name: str, places: int) -> str:
    """A metric by working set and policy, with the values that the thesis implies at 35."""
    head = ["working set", *(policy.upper() for policy in paper.policies)]
    rows = [
        [
            str(size),
            *(f"{measured.figures[p, size].metric(name):.{places}f}" for p in paper.policies),
        ]
        for size in paper.working_sets
    ]
    implied = paper.implied(name)
    theirs = [_number(implied.get(policy), places) for policy in paper.policies]
    ours = [measured.figures[policy, SWEEP_WORKING_SET].metric(name) for policy in paper.policies]
    apart = [
        _signed(mine - implied[policy], places) if policy in implied else _NONE
        for policy, mine in zip(paper.policies, ours, strict=True)
    ]
    rows.append([f"{SWEEP_WORKING_SET}, thesis", *theirs])
    rows.append([f"{SWEEP_WORKING_SET}, difference", *apart])
    return table(head, rows)


def spread(measured: Measured, paper: Paper) -> str:
    """Lowest and highest average latency over the seeds."""
    head = ["working set", *(policy.upper() for policy in paper.policies)]
    rows = []
    for size in paper.working_sets:
        figures = [measured.figures[policy, size] for policy in paper.policies]
        rows.append(
            [str(size), *(f"{f.lowest_avg_s:.1f} to {f.highest_avg_s:.1f}" for f in figures)]
        )
    return table(head, rows)


def utilisation(measured: Measured, paper: Paper) -> str:
    """Busy GPU time over RR's, beside the thesis's SM utilisation over RR's."""
    reference = paper.policies[0]
    head = ["working set", *(policy.upper() for policy in paper.policies)]
    rows = []
    for size in paper.working_sets:
        ratios = [
            measured.ratio(policy, reference, "gpu_busy_ratio", size) for policy in paper.policies
        ]
        rows.append([f"{size}, over {reference.upper()}", *(f"{ratio:.2f}" for ratio in ratios)])
    theirs = [
        paper.utilisation_ratio(policy) if policy in paper.sm_utilisation else None
        for policy in paper.policies
    ]
    rows.append(["thesis (SM), all sizes", *(_number(ratio, 2) for ratio in theirs)])
    busy = [measured.figures[p, SWEEP_WORKING_SET].gpu_busy_ratio for p in paper.policies]
    rows.append([f"{SWEEP_WORKING_SET}, busy ratio", *(f"{share:.3f}" for share in busy)])
    return table(head, rows)


def copies(measured: Measured, paper: Paper) -> str:
    """Table 2: our figures, with the thesis's and the difference in brackets."""
    rows = []
    for row in paper.table2:
        ours = measured.figures[row.policy, row.working_set].copies
        cells = [
            f"{mine:.2f} ({row_copies:.2f}, {mine - row_copies:+.2f})"
            for mine, row_copies in zip(ours, row.copies, strict=True)
        ]
        rows.append([str(row.working_set), row.policy.upper(), *cells])
    return table(["working set", "policy", *paper.models], rows, text_columns=2)


def sweep(measured: Measured, paper: Paper) -> str:
    """Table 3: our figures, with the thesis's and the difference in brackets."""
    head = ["limit", "average latency s", "latency variance", "miss ratio", "false-miss ratio"]
    rows = []
    for row in paper.table3:
        ours = measured.sweep[row.o3_limit]
        cells = [
            _beside(ours.avg_latency_s, row.avg_latency_s, 2),
            _beside(ours.latency_variance, row.latency_variance, 1),
            _beside(ours.miss_ratio, row.miss_ratio, 2),
            _beside(ours.false_miss_ratio, row.false_miss_ratio, 2),
        ]
        rows.append([str(row.o3_limit), *cells])
    return table(head, rows)


def grid(points: Sequence[Point], rows: str) -> str:
    """Distances and reproduced claims: a row a pattern or memory size, a column an overhead.

    The nearest of those with the most claims is bold.
    """
    overheads_s = sorted({point.setting.overhead_s for point in points})
    (first,) = best(points, 1)
    by_row: dict[str, dict[float, str]] = {}
    for point in points:
        label = _label(point.setting, rows)
        cell = f"{point.distance.total:.3f}, {point.reproduced}"
        by_row.setdefault(label, {})[point.setting.overhead_s] = (
            f"**{cell}**" if point is first else cell
        )
    head = [rows, *(f"{seconds:.2f} s" for seconds in overheads_s)]
    cells = [
        [label, *(found[seconds] for seconds in overheads_s)] for label, found in by_row.items()
    ]
    return table(head, cells)


def _label(setting: Setting, rows: str) -> str:
    return setting.arrivals() if rows == "arrivals" else f"{setting.gpu_memory_mb} MB"


def _beside(ours: float, theirs: float, places: int) -> str:
    return f"{ours:.{places}f} ({theirs:.{places}f}, {_signed(ours - theirs, places)})"


def _signed(value: float, places: int) -> str:
    return f"{value:+.{places}f}"


def _number(value: float | None, places: int) -> str:
    return _NONE if value is None else f"{value:.{places}f}"


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
    points = [calibrate.point(each.measured, paper) for each in found]
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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All results that the page shows."""

    paper: Paper
    by_reading: Sequence[MeasuredVariant]
    seeds: int
    by_arrivals: Sequence[Point]
    by_memory: Sequence[Point]
    grid_seeds: int
    beyond: str

    @property
    def measured(self) -> Measured:
        """The figures of the setting in use, which is the first reading."""
        return self.by_reading[0].measured


def generated_parts(evaluation: Evaluation) -> Mapping[str, str]:
    """Each part in Markdown, in the order of the page."""
    measured, paper = evaluation.measured, evaluation.paper
    return {
        "summary": _summary(evaluation),
        "minimum": checks(minimum(measured)),
        "claims": claims(judge(measured, paper)),
        "orders": checks(orders(measured), "claim without a figure"),
        "readings": by_claim(evaluation.by_reading, paper),
        "setting": _setting(evaluation),
        "figure 5": (
            _picture("Average latency", "figure05-average-latency")
            + metric(measured, paper, "avg_latency_s", 2)
            + "\n\nLowest and highest average among the seeds:\n\n"
            + spread(measured, paper)
        ),
        "figure 6": (
            _picture("Miss ratio", "figure06-miss-ratio") + metric(measured, paper, "miss_ratio", 3)
        ),
        "figure 7": (
            _picture("Busy ratio over RR's", "figure07-busy-ratio") + utilisation(measured, paper)
        ),
        "figure 8": (
            _picture("False-miss ratio", "figure08-false-miss-ratio")
            + metric(measured, paper, "false_miss_ratio", 3)
        ),
        "figure 9": _picture("Copies of vgg19", "figure09-duplicates"),
        "figure 10": _picture("Latency and miss ratio along the O3 limit", "figure10-o3-limit"),
        "table 2": copies(measured, paper),
        "table 3": sweep(measured, paper),
        "beyond": evaluation.beyond,
    }


def _picture(title: str, name: str) -> str:
    return f"![{title}](pictures/{name}.png)\n\n"


def _summary(evaluation: Evaluation) -> str:
    judged = judge(evaluation.measured, evaluation.paper)
    setting = evaluation.measured.setting
    count = Counter(each.verdict for each in judged)
    verdicts = ", ".join(f"{count[verdict]} {verdict}" for verdict in Verdict)
    return (
        f"Mean of {evaluation.seeds} seeds; the setting is **{setting.quantities()}** "
        f"a request, for all policies; read with **{'**, **'.join(setting.readings.words())}**.\n"
        f"Claims of the thesis in figures: {len(judged)}, of which {verdicts}."
    )


def _setting(evaluation: Evaluation) -> str:
    chosen = distance(evaluation.measured, evaluation.paper)
    reproduced = {
        point.setting: point.reproduced
        for point in (*evaluation.by_arrivals, *evaluation.by_memory)
    }
    most = max(reproduced.values())
    near = sorted(setting.quantities() for setting, number in reproduced.items() if number == most)
    return f"""\
The chosen setting's distance is {chosen.total:.3f} (claims {chosen.claims:.3f}, \
Table 2 {chosen.table2:.3f}, Table 3 {chosen.table3:.3f}). Distances and reproduced claims of
settings around it, with {evaluation.grid_seeds} seeds, and the best one of each table in bold:

{grid(evaluation.by_arrivals, "arrivals")}

{grid(evaluation.by_memory, "memory")}

Settings with the most claims ({most}), {len(near)} of {len(reproduced)}: {"; ".join(near)}."""
