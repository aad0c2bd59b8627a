"""What SAGE prints as numbers: Table 2's memory, Table 4's times, and its headlines."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A row of Table 2: a function's explicit memory."""

    name: str
    read_only_mb: float
    writable_mb: float


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """A column of Table 4: how long each phase of a call takes in one state, in milliseconds."""

    state: str
    end_to_end_ms: float
    cpu_context_ms: float
    cpu_data_ms: float
    gpu_context_ms: float
    gpu_data_ms: float
    compute_ms: float
    return_ms: float


@dataclass(frozen=True, slots=True)
class PrintedHeadline:
    """One of the numbers by which SAGE is judged: times (x) or percent (%)."""

    key: str
    text: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class SagePaper:
    """The printed numbers that the simulation takes in or is compared with."""

    attribution: str
    gpu_memory_mb: float
    context_mb: float
    table2: tuple[MemoryRow, ...]
    table4: tuple[PhaseTimes, ...]
    compute_share: float
    headlines: tuple[PrintedHeadline, ...]

    def column(self, state: str) -> PhaseTimes:
        """The column of Table 4 for this state."""
        (found,) = (each for each in self.table4 if each.state == state)
        return found


@cache
def sage_paper() -> SagePaper:
    """SAGE's printed numbers from our data file."""
    text = files("research").joinpath("data/sage-results.json").read_text(encoding="utf-8")
    data = cast(Mapping[str, Any], json.loads(text))
    return SagePaper(
        attribution=data["attribution"],
        gpu_memory_mb=data["gpu_memory_mb"],
        context_mb=data["context_mb"],
        table2=tuple(MemoryRow(**row) for row in data["table2"]),
        table4=tuple(PhaseTimes(**column) for column in data["table4"]),
        compute_share=data["compute_share_percent"] / 100.0,
        headlines=tuple(PrintedHeadline(**headline) for headline in data["headlines"]),
    )
