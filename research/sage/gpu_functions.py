"""The ten functions with the times of their phases: what SAGE prints, and what it leaves open."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from research.sage.printed_numbers import MemoryRow, sage_paper

_MEASURED = "resnet50"  # the function of Table 4
_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What SAGE does not print of its functions and of its machine.

    `request_ms`: loading read-only data from the database takes this long at any size, and the
    rest of resnet50's time by its megabytes. `compute_share`: the share of computing in the solo
    duration of the nine functions whose times are not printed; None: such that the average over
    the ten is the 12.1 % of section 3.2.1. `equal_compute_ms`: they compute this long instead.
    `contention`: how much each further transfer of another call slows all transfers from the
    database; `api_contention` is DGSF's, whose servers transfer for all calls, and
    `daemon_contention` SAGE's. `calls_at_once`: how many calls SAGE has on the GPU, in the order
    in which they came; DGSF's four contexts of ten functions have 40.
    """

    request_ms: float = 0.0
    compute_share: float | None = None
    equal_compute_ms: float | None = None
    contention: float = 0.0
    api_contention: float = 0.0
    daemon_contention: float = 0.0
    calls_at_once: int = 40


@dataclass(frozen=True, slots=True)
class GpuFunction:
    """One function: its memory, and how long each of its phases takes alone on the machine."""

    name: str
    context_mb: float
    read_only_mb: float
    writable_mb: float
    cpu_context_s: float
    gpu_context_s: float
    database_read_only_s: float
    database_writable_s: float
    pcie_read_only_s: float
    pcie_writable_s: float
    compute_s: float
    return_s: float

    @property
    def explicit_mb(self) -> float:
        return self.read_only_mb + self.writable_mb

    @property
    def total_mb(self) -> float:
        return self.context_mb + self.explicit_mb

    @property
    def database_s(self) -> float:
        return self.database_read_only_s + self.database_writable_s

    @property
    def pcie_s(self) -> float:
        return self.pcie_read_only_s + self.pcie_writable_s

    @property
    def data_s(self) -> float:
        """All data, from the database to the GPU."""
        return self.database_s + self.pcie_s

    @property
    def serial_setup_s(self) -> float:
        return self.cpu_context_s + self.gpu_context_s + self.data_s

    @property
    def parallel_setup_s(self) -> float:
        return self.cpu_context_s + max(self.gpu_context_s, self.data_s)


class _Rates(NamedTuple):
    """Seconds a megabyte."""

    database_read_only: float
    database_writable: float
    pcie_read_only: float
    pcie_writable: float


def ten_functions(assumed: Assumptions) -> tuple[GpuFunction, ...]:
    """Table 2's functions, in its order, with times that give resnet50 those of Table 4."""
    paper = sage_paper()
    cold = paper.column("cold")
    rates = _rates(assumed)
    bare = [_without_compute(row, rates, assumed) for row in paper.table2]
    return tuple(_with_compute(each, assumed, cold.compute_ms * _MS) for each in bare)


def copies(functions: tuple[GpuFunction, ...], times: int) -> tuple[GpuFunction, ...]:
    """As many of each, with names of their own: bert1, bert2, bert3."""
    return tuple(
        replace(each, name=f"{each.name}{number}")
        for each in functions
        for number in range(1, times + 1)
    )


def _rates(assumed: Assumptions) -> _Rates:
    """What Table 4 implies for resnet50."""
    paper = sage_paper()
    cold, warm = paper.column("cold"), paper.column("stage 1")
    (memory,) = (row for row in paper.table2 if row.name == _MEASURED)
    read_ms = cold.cpu_data_ms - warm.cpu_data_ms - assumed.request_ms
    copied_ms = cold.gpu_data_ms - warm.gpu_data_ms
    return _Rates(
        database_read_only=read_ms * _MS / memory.read_only_mb,
        database_writable=warm.cpu_data_ms * _MS / memory.writable_mb,
        pcie_read_only=copied_ms * _MS / memory.read_only_mb,
        pcie_writable=warm.gpu_data_ms * _MS / memory.writable_mb,
    )


def _without_compute(row: MemoryRow, rates: _Rates, assumed: Assumptions) -> GpuFunction:
    paper = sage_paper()
    cold = paper.column("cold")
    # Where there is no read-only data there is nothing to ask the database for beforehand.
    request_s = assumed.request_ms * _MS if row.read_only_mb else 0.0
    return GpuFunction(
        name=row.name,
        context_mb=paper.context_mb,
        read_only_mb=row.read_only_mb,
        writable_mb=row.writable_mb,
        cpu_context_s=cold.cpu_context_ms * _MS,
        gpu_context_s=cold.gpu_context_ms * _MS,
        database_read_only_s=request_s + row.read_only_mb * rates.database_read_only,
        database_writable_s=row.writable_mb * rates.database_writable,
        pcie_read_only_s=row.read_only_mb * rates.pcie_read_only,
        pcie_writable_s=row.writable_mb * rates.pcie_writable,
        compute_s=0.0,
        return_s=cold.return_ms * _MS,
    )


def _with_compute(bare: GpuFunction, assumed: Assumptions, measured_s: float) -> GpuFunction:
    if bare.name == _MEASURED:
        return replace(bare, compute_s=measured_s)
    if assumed.equal_compute_ms is not None:
        return replace(bare, compute_s=assumed.equal_compute_ms * _MS)
    share = assumed.compute_share if assumed.compute_share is not None else _share_of_the_nine()
    rest_s = bare.serial_setup_s + bare.return_s
    return replace(bare, compute_s=rest_s * share / (1.0 - share))


def _share_of_the_nine() -> float:
    """The share that gives the ten an average of section 3.2.1's, resnet50's being known."""
    paper = sage_paper()
    measured = paper.column("baseline")
    known = measured.compute_ms / measured.end_to_end_ms
    number = len(paper.table2)
    return (number * paper.compute_share - known) / (number - 1)
