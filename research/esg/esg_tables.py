"""The tables on ESG's figures: hit rate, cost, latency, misses and search times."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from research.esg.esg_experiments import (
    AQUATOPE,
    ESG,
    HEAVY,
    ORION,
    BySystem,
    EsgEvaluation,
)
from research.esg.esg_headlines import judged_esg, verdict_of
from research.esg.fitted_profiles import (
    BATCHES,
    LEAST,
    VCPUS,
    VGPUS,
    EsgAssumptions,
    GpuScaling,
    fitted_profiles,
)
from research.esg.printed_esg import esg_paper
from research.esg.search_costs import SearchTimes
from research.esg.workflow_figures import ApplicationFigures, WorkflowFigures
from research.markdown import table
from research.sage.sage_headlines import JudgedHeadline
from scheduler.model.values import Configuration

_SHOWN = (LEAST, Configuration(1, 4, 1), Configuration(1, 4, 2), Configuration(4, 4, 1))


def headline_table(evaluation: EsgEvaluation) -> str:
    """Every printed number with ours, under each scaling."""
    by_scaling = {scaling: judged_esg(evaluation, scaling) for scaling in evaluation.main}
    rows = []
    for place, printed in enumerate(esg_paper().headlines):
        cells = [cell for judged in by_scaling.values() for cell in _judged_cells(judged[place])]
        rows.append([printed.text, f"{printed.value:g} {printed.unit}", *cells])
    heads = [head for scaling in by_scaling for head in (str(scaling), "distance", "verdict")]
    return table(["headline", "ESG", *heads], rows)


def profile_table(scalings: Mapping[GpuScaling, EsgAssumptions]) -> str:
    """What each scaling makes of Table 3."""
    rows = []
    for name, row in esg_paper().table3.items():
        cells = [f"{row.run_ms:g}", f"{row.cold_ms:g}", f"{row.input_mb:g}"]
        for each in scalings.values():
            times = fitted_profiles(each)[name].times()
            cells += [f"{1e3 * times[one]:.0f}" for one in _SHOWN]
        rows.append([name, *cells])
    heads = [f"{scaling}: {_named(one)}" for scaling in scalings for one in _SHOWN]
    head = ["function", "run, ms", "cold start, ms", "input, MB", *heads]
    return table(head, rows)


def figure6(evaluation: EsgEvaluation, scaling: GpuScaling) -> str:
    """Hit rate and cost by setting and system."""
    rows = []
    for level, found in evaluation.main[scaling].items():
        for name, each in found.items():
            rows.append(
                [
                    level,
                    name,
                    percent(each.hit),
                    percent(min(each.hits)),
                    f"{each.cost / found[ESG].cost:.3f}",
                    f"{each.cost:.1f}",
                    f"{each.latency:.2f}",
                    f"{each.batch:.2f}",
                    percent(each.local),
                    percent(each.least),
                ]
            )
    head = ["setting", "system", "hit rate", "worst seed", "cost, ESG's = 1", "$ a million calls"]
    more = [
        "latency, of the deadline",
        "calls a batch",
        "same node as before",
        "least configuration",
    ]
    return table([*head, *more], rows, text_columns=2)


def figure7(found: BySystem) -> str:
    """Latencies by application, as parts of the deadline: mean, 95th percentile."""
    return _by_application(found, lambda each: f"{each.mean:.2f}, {each.p95:.2f}")


def figure8(main: Mapping[str, BySystem]) -> str:
    """Hit rate and cost of each application in each setting."""
    parts = []
    for level, found in main.items():
        cells = _by_application(found, lambda each: f"{percent(each.hit)}, {each.cost:.0f} $")
        parts.append(f"{level}:\n\n{cells}")
    return "\n\n".join(parts)


def table4(evaluation: EsgEvaluation, scaling: GpuScaling) -> str:
    """Configurations planned before that did not apply."""
    printed = {each.key: each.value for each in esg_paper().headlines}
    rows = [
        [
            level,
            *(
                cell
                for name in (ORION, AQUATOPE)
                for cell in (
                    f"{printed[f'miss {name} {level}']:g} %",
                    percent(found[name].missed),
                )
            ),
        ]
        for level, found in evaluation.main[scaling].items()
    ]
    return table(["setting", "Orion, ESG's", "simulated", "Aquatope, ESG's", "simulated"], rows)


def figure9(evaluation: EsgEvaluation) -> str:
    """Orion's hit rate along the time that its search may take."""
    rows = [
        [f"{cut_off:g} ms", percent(free.hit), percent(counted.hit)]
        for cut_off, (counted, free) in evaluation.cut_offs.items()
    ]
    return table(["cut-off", "hit rate, search not counted", "search counted"], rows)


def figure10(evaluation: EsgEvaluation) -> str:
    """Search times in each setting."""
    study = evaluation.search
    rows = [_times_row(f"{level}, three blades", each) for level, each in study.by_level.items()]
    rows += [
        _times_row(f"{level}, the paper's two blades", each)
        for level, each in study.two_blades.items()
    ]
    times = table(["searches", "mean, ms", "median, ms", "slowest, ms"], rows)
    many = evaluation.plan.searched or len(BATCHES) * len(VCPUS) * len(VGPUS)
    return (
        f"{times}\n\nBrute force for three functions of {many} configurations, once: "
        f"{study.brute_force_ms:.0f} ms; ESG_1Q's costs differ from its costs by {study.gap:.1e} "
        f"at most. A group of four: {study.group_of_four_ms:.0f} ms. The whole curve, for every "
        f"deadline at once: {study.curve_ms:.0f} ms, then {study.look_up_us:.1f} µs a look-up."
    )


def figure11(evaluation: EsgEvaluation) -> str:
    """Along K: search times, and strict-light under ESG with that K."""
    base = evaluation.kept[5]
    times = evaluation.search.by_kept
    rows = [
        [
            str(kept),
            f"{fmean(times[kept].times_ms):.2f}" if kept in times else "–",
            f"{each.cost / base.cost:.3f}",
            f"{each.latency:.3f}",
            percent(each.hit),
        ]
        for kept, each in evaluation.kept.items()
    ]
    return table(
        ["K", "search, ms", "cost, K = 5 is 1", "latency, of the deadline", "hit rate"], rows
    )


def figure12(evaluation: EsgEvaluation) -> str:
    """ESG without batches, and without sharing GPUs."""
    base = evaluation.ablation["ESG"]
    rows = [
        [
            label,
            percent(each.hit),
            f"{each.cost / base.cost:.2f}",
            f"{each.latency:.2f}",
            f"{each.batch:.2f}",
            percent(each.local),
        ]
        for label, each in evaluation.ablation.items()
    ]
    head = ["ESG", "hit rate", "cost", "latency, of the deadline", "calls a batch"]
    return table([*head, "same node as before"], rows)


def reading_table(evaluation: EsgEvaluation) -> str:
    """ESG under other readings of its text."""
    rows = [
        [label, percent(strict.hit), f"{strict.cost:.1f}", percent(heavy.hit), f"{heavy.cost:.1f}"]
        for label, (strict, heavy) in evaluation.readings.items()
    ]
    head = ["reading", "strict-light: hit rate", "$ a million", f"{HEAVY}: hit rate", "$ a million"]
    return table(head, rows)


def variant_table(evaluation: EsgEvaluation) -> str:
    """Hit rate and cost of each system under other assumptions."""
    names = list(next(iter(next(iter(evaluation.variants.values())).values())))
    rows = [
        [label, level, *(hit_and_cost(found[name], found[ESG]) for name in names)]
        for label, by_level in evaluation.variants.items()
        for level, found in by_level.items()
    ]
    return table(["assumption", "setting", *names], rows, text_columns=2)


def hit_and_cost(each: WorkflowFigures, base: WorkflowFigures) -> str:
    """The hit rate, and the cost over the other one's."""
    return f"{percent(each.hit)} × {each.cost / base.cost:.2f}"


def _by_application(found: BySystem, cell: Callable[[ApplicationFigures], str]) -> str:
    names = [application.name for application in esg_paper().applications]
    rows = [[name, *(cell(each.by_application[name]) for each in found.values())] for name in names]
    return table(["application", *found], rows)


def _times_row(label: str, each: SearchTimes) -> list[str]:
    times = each.times_ms
    return [label, f"{fmean(times):.2f}", f"{each.at(0.5):.2f}", f"{each.at(1.0):.2f}"]


def _judged_cells(judged: JudgedHeadline) -> Sequence[str]:
    return (
        f"{judged.ours:.3g} {judged.printed.unit}",
        f"× {judged.factor:.2f}",
        str(verdict_of(judged)),
    )


def _named(one: Configuration) -> str:
    return f"{one.batch}/{one.vcpus}/{one.vgpus}"


def percent(share: float) -> str:
    """A share of 1 in percent."""
    return f"{100.0 * share:.1f} %"
