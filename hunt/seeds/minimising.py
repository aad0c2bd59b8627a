"""Finds the faults that a failing seed needs, by leaving out one after the other."""

from hunt.seeds.scenarios.fault_plan import Fault
from hunt.seeds.scenarios.scenario import scenario_of
from hunt.seeds.simulation import run_seed


def minimised(seed: int) -> tuple[Fault, ...]:
    """As few of the scenario's faults as still fail, though perhaps in another way."""
    needed = scenario_of(seed).faults
    if not run_seed(seed).violations:
        return needed
    for fault in needed:
        fewer = tuple(each for each in needed if each is not fault)
        if run_seed(seed, faults=fewer).violations:
            needed = fewer
    return needed
