"""SAGE's five systems by name, and one run of one of them on one node."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from cache_manager.tiers import exits
from research.sage.fair_link import FairLink
from research.sage.gpu_functions import Assumptions, GpuFunction
from research.sage.gpu_machine import GpuMachine, MemoryMeter, SimulatedCall, Then
from research.sage.printed_numbers import sage_paper
from research.sage.serial_calls import GRANULE_MB, ContextAdmission, MemoryAdmission
from research.sage.shared_engines import SharedEngines

# When which function is called, by its place in the list of functions.
CallTimes = Sequence[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class GpuSystem:
    """One way to run functions on a GPU.

    `contexts` of 0: a call makes its own. With `shares`, calls of one function share an engine,
    which leaves by the exit rule; without `shares_data` each of them loads all of its data.
    """

    name: str
    granule_mb: float | None = None
    contexts: int = 0
    contexts_stay_s: float | None = None
    shares: bool = False
    shares_data: bool = True
    exit_rule: str = "fixed"


FIXED_GSL = GpuSystem("FixedGSL", granule_mb=GRANULE_MB)
FIXED_GSL_F = GpuSystem("FixedGSL-F")
DGSF = GpuSystem("DGSF", contexts=4)
# Section 7.7 compares SAGE-NR with a DGSF whose contexts go when nobody called for 30 s.
# Four contexts for each of 30 functions are more than the GPU's memory.
DGSF_OF_TWO = GpuSystem("DGSF, 2 contexts", contexts=2)
DGSF_LEAVING = GpuSystem("DGSF, contexts leave", contexts=4, contexts_stay_s=30.0)
SAGE_NR = GpuSystem("SAGE-NR", shares=True, shares_data=False)
SAGE = GpuSystem("SAGE", shares=True)


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What came of one run: the calls that ended, in the order of their ends.

    `memory_mb` is what was in use on average, `left_mb` what is in use at the end.
    """

    ended: Sequence[SimulatedCall]
    arrived: int
    memory_mb: float
    left_mb: float


def run_node(
    system: GpuSystem,
    functions: Sequence[GpuFunction],
    times: CallTimes,
    assumed: Assumptions,
    period_s: float = inf,
) -> NodeRun:
    """The calls on one node, until all have ended or the period is over."""
    served = functions if system.shares_data else [_own_data(each) for each in functions]
    machine = GpuMachine(MemoryMeter(sage_paper().gpu_memory_mb))
    machine.database = FairLink(_contention(system, assumed))
    calls = [SimulatedCall(served[number], number, at_s) for at_s, number in times]
    machine.run(calls, _admission(system, machine, served, assumed), period_s)
    ended = [call for call in machine.ended if call.ended_s <= period_s]
    last_s = period_s if period_s < inf else max((call.ended_s for call in ended), default=0.0)
    memory = machine.memory
    return NodeRun(ended, len(calls), memory.mean_mb(last_s), memory.used_mb)


def _contention(system: GpuSystem, assumed: Assumptions) -> float:
    """Only the calls of FixedGSL transfer by themselves, each from its own container."""
    if system.shares:
        return assumed.daemon_contention
    return assumed.api_contention if system.contexts else assumed.contention


def _admission(
    system: GpuSystem,
    machine: GpuMachine,
    functions: Sequence[GpuFunction],
    assumed: Assumptions,
) -> Then:
    if system.shares:
        rule = exits.make(system.exit_rule)
        return SharedEngines(machine, functions, rule, assumed.calls_at_once).arrived
    if system.contexts:
        pools = ContextAdmission(machine, functions, system.contexts, system.contexts_stay_s)
        return pools.arrived
    return MemoryAdmission(machine, system.granule_mb).arrived


def _own_data(function: GpuFunction) -> GpuFunction:
    """The function as if all its data were written by every call: nothing is shared."""
    return replace(
        function,
        read_only_mb=0.0,
        writable_mb=function.explicit_mb,
        database_read_only_s=0.0,
        database_writable_s=function.database_s,
        pcie_read_only_s=0.0,
        pcie_writable_s=function.pcie_s,
    )
