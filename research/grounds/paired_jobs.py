"""Jobs of the paper on interference, for GPUs that run two at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from cache_manager.model.ids import MIB, ModelId
from research.interference.printed import interference_paper
from scheduler.model.values import SlotId, SlotSpec
from scheduler.sim.model_catalogue import Hardware, SimModel
from scheduler.sim.workload import Workload

_GIB_MB = 1024
_GPUS, _JOBS_EACH = 2, 12
# Peaks in GB, beside those that are printed.
_PEAK_GB, _OTHER_GB = {"vgg16": 8.9}, 3.0
_RUN_S = (2.0, 10.0)
_LEAST = 0.1  # no run is faster than this beside others, whatever a table says


@dataclass(frozen=True, slots=True)
class SharedHardware(Hardware):
    """GPUs each of which has `at_once` leases, whose runs slow each other down by `slowdowns`.

    That is of one model beside another, and nothing for pairs that it does not name. Runs of one
    model take turns.
    """

    at_once: int = 2
    slowdowns: Mapping[tuple[ModelId, ModelId], float] = field(default_factory=dict, hash=False)

    def slowdown(self, model: ModelId, others: Sequence[ModelId]) -> float:
        """How many times as long a run takes beside runs of these."""
        factor = 1.0
        for other in others:
            factor += 1.0 if other == model else self.slowdowns.get((model, other), 1.0) - 1.0
        return max(factor, _LEAST)

    def parts(self, gpu: str) -> tuple[SlotSpec, ...]:
        return (SlotSpec(SlotId(gpu), self.at_once, at_once=True),)


def paired_jobs(seed: int) -> Workload:
    """Twelve jobs of each of five applications, in random order, all there at once; no loads."""
    paper, random = interference_paper(), Random(f"jobs {seed}")
    peaks = {**_PEAK_GB, **paper.peak_gb}
    models = tuple(
        SimModel(
            ModelId(name),
            "one",
            int(peaks.get(name, _OTHER_GB) * _GIB_MB) * MIB,
            0.0,
            random.uniform(*_RUN_S),
        )
        for name in paper.trained
    )
    jobs = [model.id for model in models for _ in range(_JOBS_EACH)]
    random.shuffle(jobs)
    return Workload(models, tuple((0.0, job) for job in jobs))


def paired_hardware(apart: float) -> SharedHardware:
    """Two GPUs of the paper's size; the slowdowns are so many times as far from 1 as printed."""
    paper = interference_paper()
    slowdowns = {
        (ModelId(one), ModelId(other)): 1.0 + apart * max(0.0, value - 1.0)
        for (one, other), value in paper.table.items()
    }
    return SharedHardware(_GPUS, int(paper.gpu_gb * _GIB_MB), slowdowns=slowdowns)
