"""Profile tables through Table 3, under two scalings, and everything else that ESG leaves open."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import ceil

from research.esg.printed import FunctionRow, esg_paper
from scheduler.model.values import Configuration
from scheduler.policies.weighing import Prices, StageProfile, profile

# 256 configurations a function, as in section 5.3; the lists of options are ours.
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
VCPUS = (1, 2, 3, 4, 5, 6, 7, 8)
VGPUS = (1, 2, 4, 7)
LEAST = Configuration(1, 1, 1)


def seconds_of(stage: StageProfile) -> Mapping[Configuration, float]:
    """The times of a stage by configuration."""
    return {choice.configuration: choice.time_s for choice in stage.choices}


class GpuScaling(StrEnum):
    """How a batch uses several vGPUs.

    `PORTIONS`: each vGPU gets a portion of the batch (section 3.2, to the letter), so that one
    request gains nothing from a second vGPU. `DIVIDED`: the work of a request divides too, with
    Amdahl's law (Figure 3 runs a batch of 1 on two vGPUs).
    """

    PORTIONS = "portions"
    DIVIDED = "divided"


@dataclass(frozen=True, slots=True)
class EsgAssumptions:
    """What ESG does not print.

    `cpu_share` of a run alone is CPU work, of which `cpu_parallel` divides among vCPUs;
    `gpu_fixed` of its GPU work does not grow with the batch; `gpu_parallel` divides among vGPUs
    where anything does. An input is local if the stage before ran on this node, or if it came with
    the call; else it comes over the network.
    `warm`: idle instances of each function on each node when the run begins.
    """

    scaling: GpuScaling = GpuScaling.PORTIONS
    cpu_share: float = 0.4
    cpu_parallel: float = 0.9
    gpu_fixed: float = 0.5
    gpu_parallel: float = 0.9
    noise: float = 0.05
    remote_ms: float = 20.0
    remote_mb_s: float = 50.0
    local_ms: float = 1.0
    local_mb_s: float = 1000.0
    warm: int = 7
    search_ms: float = 3.0
    enumeration_ms: float = 1.0
    states_a_ms: float = 20.0
    rounds: int = 3

    def transfer_s(self, megabytes: float, *, local: bool) -> float:
        """How long the input of one request takes to where it is needed."""
        if local:
            return self.local_ms / 1e3 + megabytes / self.local_mb_s
        return self.remote_ms / 1e3 + megabytes / self.remote_mb_s

    def run_s(self, row: FunctionRow, configuration: Configuration) -> float:
        """How long a batch runs; one request on one vCPU and one vGPU takes Table 3's time."""
        batch, vcpus, vgpus = configuration
        serial = 1.0 - self.cpu_parallel
        cpu = batch * (serial + self.cpu_parallel / vcpus)
        alone_s = row.run_ms / 1e3
        return alone_s * (self.cpu_share * cpu + (1.0 - self.cpu_share) * self._gpu(batch, vgpus))

    def _gpu(self, batch: int, vgpus: int) -> float:
        """The GPU's time over that of one request on one vGPU."""
        growing = 1.0 - self.gpu_fixed
        if self.scaling is GpuScaling.PORTIONS:
            return self.gpu_fixed + growing * ceil(batch / vgpus)
        divided = 1.0 - self.gpu_parallel + self.gpu_parallel / vgpus
        return (self.gpu_fixed + growing * batch) * divided


@cache
def fitted_profiles(
    assumed: EsgAssumptions, prices: Prices | None = None
) -> Mapping[str, StageProfile]:
    """The profile of each of the six functions, at the paper's prices or others."""
    paper = esg_paper()
    grid = [Configuration(b, c, g) for b in BATCHES for c in VCPUS for g in VGPUS]
    return {
        name: profile({each: assumed.run_s(row, each) for each in grid}, prices or paper.prices)
        for name, row in paper.table3.items()
    }
