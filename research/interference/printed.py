"""What Kim and Kim print as numbers, and the slowdowns of all pairs that these imply."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class PrintedInterference:
    """The printed numbers; `table` has foreground and background, without pairs of no memory."""

    attribution: str
    gpu_gb: float
    table: Mapping[tuple[str, str], float]
    too_large: frozenset[frozenset[str]]
    further_pairs: Mapping[tuple[str, str], float]
    peak_gb: Mapping[str, float]
    mse: float
    other_mse: tuple[float, float]
    makespan_s: Mapping[str, float]

    @property
    def trained(self) -> tuple[str, ...]:
        """The five applications of Table IV."""
        return tuple(dict.fromkeys(foreground for foreground, _ in self.table))

    @property
    def applications(self) -> tuple[str, ...]:
        """All nine."""
        further = (name for pair in self.further_pairs for name in pair)
        return tuple(dict.fromkeys((*self.trained, *further)))


@dataclass(frozen=True, slots=True)
class AdditiveTable:
    """A slowdown as a part of the foreground and a part of the background.

    A linear regression on the metrics of both has this form, whatever the metrics are. The parts
    are known up to one constant: `suffers` of the first application is 0.
    """

    suffers: Mapping[str, float]
    disturbs: Mapping[str, float]
    largest_error: float


@cache
def interference_paper() -> PrintedInterference:
    """The printed numbers from our data file."""
    path = files("research").joinpath("data/interference-results.json")
    data = cast(Mapping[str, Any], json.loads(path.read_text(encoding="utf-8")))
    cells = {
        (one, other): value for one, row in data["table4"].items() for other, value in row.items()
    }
    return PrintedInterference(
        attribution=data["attribution"],
        gpu_gb=data["gpu_gb"],
        table={pair: value for pair, value in cells.items() if value > 0},
        too_large=frozenset(frozenset(pair) for pair, value in cells.items() if value < 0),
        further_pairs={(one, other): value for one, other, value in data["further_pairs"]},
        peak_gb=data["peak_gb"],
        mse=data["mse"],
        other_mse=tuple(data["other_mse"]),
        makespan_s=data["makespan_s"],
    )


def additive(paper: PrintedInterference) -> AdditiveTable:
    """The parts that fit Table IV best: means in turn, until they stay."""
    names = paper.trained
    suffers = dict.fromkeys(names, 0.0)
    disturbs = dict.fromkeys(names, 0.0)
    for _ in range(200):
        for name in names:
            disturbs[name] = fmean(
                value - suffers[one] for (one, other), value in paper.table.items() if other == name
            )
        for name in names:
            suffers[name] = fmean(
                value - disturbs[other]
                for (one, other), value in paper.table.items()
                if one == name
            )
    first = suffers[names[0]]
    suffers = {name: value - first for name, value in suffers.items()}
    disturbs = {name: value + first for name, value in disturbs.items()}
    errors = (value - suffers[one] - disturbs[other] for (one, other), value in paper.table.items())
    return AdditiveTable(suffers, disturbs, max(map(abs, errors)))
