"""The evaluation's tables: our figures beside the thesis's, and the difference."""

from collections.abc import Sequence

from research.markdown import table
from research.thesis.calibrate import Point, best
from research.thesis.claims import Check, Judged
from research.thesis.experiments import Measured, Setting
from research.thesis.printed_figures import SWEEP_WORKING_SET, Paper

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
