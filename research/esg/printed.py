"""What ESG prints as numbers: Table 3, its applications, settings and prices, its headlines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast

from research.esg.applications import Application
from research.sage.printed_numbers import PrintedHeadline
from scheduler.policies.weighing import Prices


@dataclass(frozen=True, slots=True)
class FunctionRow:
    """A row of Table 3: a function alone on one vCPU and one vGPU, one request at a time."""

    name: str
    run_ms: float
    cold_ms: float
    input_mb: float


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """A deadline, as a part of L, and the range from which the arrivals' intervals are drawn."""

    name: str
    slo_of_l: float
    interval_ms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class EsgPaper:
    """The printed numbers that the simulation takes in or is compared with."""

    attribution: str
    nodes: int
    vcpus: int
    vgpus: int
    prices: Prices
    keep_alive_s: float
    table3: Mapping[str, FunctionRow]
    applications: tuple[Application, ...]
    levels: tuple[LoadLevel, ...]
    headlines: tuple[PrintedHeadline, ...]

    def level(self, name: str) -> LoadLevel:
        """The setting of that name."""
        (found,) = (each for each in self.levels if each.name == name)
        return found

    def alone_s(self, application: Application) -> float:
        """L: how long an application takes alone in the minimum configuration."""
        alone_ms = {stage: self.table3[stage].run_ms for stage in application.stages}
        return sum(alone_ms[stage] for stage in application.heaviest_path(alone_ms)) / 1e3

    def work_s(self, applications: Sequence[Application]) -> float:
        """What all stages of a call take in the minimum configuration, on average over these."""
        works_ms = (
            sum(dict(each.chances).get(stage, 1.0) * self.table3[stage].run_ms
                for stage in each.stages)
            for each in applications
        )  # fmt: skip
        return sum(works_ms) / len(applications) / 1e3


@cache
def esg_paper() -> EsgPaper:
    """ESG's printed numbers from our data file."""
    text = files("research").joinpath("data/esg-results.json").read_text(encoding="utf-8")
    data = cast(Mapping[str, Any], json.loads(text))
    return EsgPaper(
        attribution=data["attribution"],
        nodes=data["nodes"],
        vcpus=data["vcpus"],
        vgpus=data["vgpus"],
        prices=Prices(data["vcpu_dollars_per_hour"], data["vgpu_dollars_per_hour"]),
        keep_alive_s=data["keep_alive_s"],
        table3={row["name"]: FunctionRow(**row) for row in data["table3"]},
        applications=tuple(
            Application(each["name"], tuple(each["stages"])) for each in data["applications"]
        ),
        levels=tuple(
            LoadLevel(each["name"], each["slo_of_l"], tuple(each["interval_ms"]))
            for each in data["settings"]
        ),
        headlines=tuple(PrintedHeadline(**headline) for headline in data["headlines"]),
    )
