"""The pictures of the page on ESG; needs matplotlib, so imported only by commands that draw."""

from collections.abc import Callable
from pathlib import Path

from gpufaas.output.bar_pictures import Bars
from research.esg.experiments import ESG, BySystem, EsgEvaluation
from research.pictures import draw_bars

_Value = Callable[[BySystem, str], float]


def draw_esg(folder: Path, evaluation: EsgEvaluation) -> None:
    """Draw all three pictures into the folder."""
    _draw_settings(
        folder / "esg-hit-rates.png",
        evaluation,
        ("Calls within their deadline", "per cent"),
        lambda found, name: 100.0 * found[name].hit,
    )
    _draw_settings(
        folder / "esg-costs.png",
        evaluation,
        ("Cost of a call", "over ESG's"),
        lambda found, name: found[name].cost / found[ESG].cost,
    )
    _draw_loads(folder / "esg-loads.png", evaluation)


def _draw_settings(
    path: Path, evaluation: EsgEvaluation, titles: tuple[str, str], value: _Value
) -> None:
    found = {
        f"{level.partition('-')[0]}\n{scaling}": by_system
        for scaling, main in evaluation.main.items()
        for level, by_system in main.items()
    }
    systems = next(iter(found.values()))
    ours = {name: [value(each, name) for each in found.values()] for name in systems}
    draw_bars(path, Bars(*titles, list(found), ours, across=""))


def _draw_loads(path: Path, evaluation: EsgEvaluation) -> None:
    loads = evaluation.loads[evaluation.plan.assumed.scaling]
    systems = next(iter(loads.values()))
    ours = {name: [100.0 * each[name].hit for each in loads.values()] for name in systems}
    groups = [f"× {factor:g}" for factor in loads]
    bars = Bars(
        "Calls within their deadline, intervals of relaxed-heavy cut short",
        "per cent",
        groups,
        ours,
        across="intervals between calls",
    )
    draw_bars(path, bars)
