"""What a call costs in processor time: of each part that serves, and of everything else."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.measure.load_figures import LoadFigures
from bench.measure.process_usage import machine_processor_s


@dataclass(frozen=True, slots=True)
class CallCosts:
    """One load: its figures, and the processor seconds of a call by part.

    `others` is how many cores processes took that neither serve nor put the load.
    """

    figures: LoadFigures
    processor_s: Mapping[str, float]
    others: float


def call_costs(
    put_load: Callable[[], LoadFigures], usage: Callable[[], Mapping[str, float]]
) -> CallCosts:
    """Put a load; `usage` gives the processor seconds so far of each part that serves it."""
    before, machine_before_s, began_s = usage(), machine_processor_s(), time.monotonic()
    figures = put_load()
    took_s = time.monotonic() - began_s  # more than was asked for, where the last answers are late
    machine_s = machine_processor_s() - machine_before_s
    spent_s = {part: now_s - before[part] for part, now_s in usage().items() if part in before}
    calls = max(1.0, figures.rate * took_s)
    ours_s = sum(spent_s.values()) + figures.generator * took_s
    return CallCosts(
        figures,
        {part: part_s / calls for part, part_s in spent_s.items()},
        max(0.0, machine_s - ours_s) / took_s,
    )
