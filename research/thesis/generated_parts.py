"""The generated parts of docs/evaluation.md, by name: tables, verdicts and pictures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from research.thesis import tables
from research.thesis.calibrate import Point, distance
from research.thesis.claims import Verdict, judge, minimum, orders
from research.thesis.experiments import Measured
from research.thesis.printed_figures import Paper
from research.thesis.reading_tables import MeasuredVariant, by_claim


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
        "minimum": tables.checks(minimum(measured)),
        "claims": tables.claims(judge(measured, paper)),
        "orders": tables.checks(orders(measured), "claim without a figure"),
        "readings": by_claim(evaluation.by_reading, paper),
        "setting": _setting(evaluation),
        "figure 5": (
            _picture("Average latency", "figure05-average-latency")
            + tables.metric(measured, paper, "avg_latency_s", 2)
            + "\n\nLowest and highest average among the seeds:\n\n"
            + tables.spread(measured, paper)
        ),
        "figure 6": (
            _picture("Miss ratio", "figure06-miss-ratio")
            + tables.metric(measured, paper, "miss_ratio", 3)
        ),
        "figure 7": (
            _picture("Busy ratio over RR's", "figure07-busy-ratio")
            + tables.utilisation(measured, paper)
        ),
        "figure 8": (
            _picture("False-miss ratio", "figure08-false-miss-ratio")
            + tables.metric(measured, paper, "false_miss_ratio", 3)
        ),
        "figure 9": _picture("Copies of vgg19", "figure09-duplicates"),
        "figure 10": _picture("Latency and miss ratio along the O3 limit", "figure10-o3-limit"),
        "table 2": tables.copies(measured, paper),
        "table 3": tables.sweep(measured, paper),
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

{tables.grid(evaluation.by_arrivals, "arrivals")}

{tables.grid(evaluation.by_memory, "memory")}

Settings with the most claims ({most}), {len(near)} of {len(reproduced)}: {"; ".join(near)}."""
