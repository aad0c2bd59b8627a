"""The generated parts of docs/evaluation/sage.md, by name."""

from collections import Counter
from collections.abc import Mapping

from research.sage import exit_tables, sage_tables
from research.sage.printed_numbers import sage_paper
from research.sage.sage_experiments import SageEvaluation
from research.sage.sage_headlines import judged_headlines
from research.sage.system_study import SageSetting
from research.thesis.claims import Verdict

# Table 4 is printed to a tenth of a millisecond.
_PRINTED_TO_MS = 0.05
PICTURES = {
    "sage-latency": "Mean latency by function and system",
    "sage-memory": "GPU memory in use, throughput",
    "sage-exits": "GPU memory against cold loads, under three exit rules",
}


def sage_blocks(evaluation: SageEvaluation) -> Mapping[str, str]:
    """Each part in Markdown, in the order of the page."""
    return {
        "summary": _summary(evaluation),
        "table 4": sage_tables.table4(evaluation),
        "headlines": sage_tables.headlines(judged_headlines(evaluation)),
        "functions": sage_tables.functions(evaluation),
        "latency": _picture("sage-latency") + sage_tables.latencies(evaluation.main),
        "systems": _picture("sage-memory") + sage_tables.systems(evaluation.main),
        "peak": sage_tables.at_peak(evaluation),
        "peak by contention": sage_tables.peak_along_contention(evaluation),
        "thirty": sage_tables.systems(evaluation.thirty),
        "four": sage_tables.systems(evaluation.four),
        "setting": _grid(evaluation),
        "sensitivity": sage_tables.assumptions(evaluation),
        "exits": _exits(evaluation),
        "exits on the machine": exit_tables.machine_table(evaluation.exits),
        "exit curves": exit_tables.curve_table(evaluation.exits),
    }


def _picture(name: str) -> str:
    return f"![{PICTURES[name]}](../pictures/{name}.png)\n\n"


def _summary(evaluation: SageEvaluation) -> str:
    judged = judged_headlines(evaluation)
    count = Counter(each.verdict for each in judged)
    verdicts = ", ".join(f"{count[verdict]} {verdict}" for verdict in Verdict)
    exact = all(
        abs(evaluation.table4_s[column.state] * 1e3 - column.end_to_end_ms) < _PRINTED_TO_MS
        for column in sage_paper().table4
    )
    equal = exit_tables.equal_points(evaluation.exits.all)
    return (
        f"The setting: {_in_words(evaluation.plan.setting)}.\n"
        f"Headlines: {len(judged)}, of which {verdicts}. "
        f"Table 4: {'exact in all six columns' if exact else 'not exact'}.\n"
        f"`adaptive` against 30 s a stage, all windows: {_change(equal.cold_at_memory)} cold loads "
        f"at equal GPU memory, {_change(equal.memory_at_cold)} GPU memory at equal cold loads."
    )


def _in_words(setting: SageSetting) -> str:
    assumed = setting.assumed
    return (
        f"load {setting.load:g} of what the GPU's cores can compute, contention "
        f"{assumed.contention:g} a further transfer, {assumed.request_ms:g} ms for each request to "
        f"the database, {setting.minutes} minutes of the trace"
    )


def _grid(evaluation: SageEvaluation) -> str:
    return "\n\n".join(
        (
            sage_tables.grid(evaluation.grid),
            "Along contention, at the chosen load:",
            sage_tables.along_contention(evaluation),
            "Along load, at the chosen contention:",
            sage_tables.along_load(evaluation),
        )
    )


def _exits(evaluation: SageEvaluation) -> str:
    return "\n\n".join(
        (
            _picture("sage-exits").rstrip(),
            exit_tables.equal_table(evaluation.exits),
            exit_tables.defaults_table(evaluation.exits),
        )
    )


def _change(percent: float | None) -> str:
    return "an unknown change of" if percent is None else f"{percent:+.0f} %"
