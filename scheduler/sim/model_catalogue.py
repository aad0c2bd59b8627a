"""What a simulated cluster has: GPUs, the thesis's models (Table 1), functions that share them."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import count
from math import inf
from pathlib import Path

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier
from scheduler.model.errors import BadWorkload
from scheduler.model.values import ANY_GPU_TYPE, GpuSpec, ModelSpec, SlotId, SlotSpec

MOST_USED = ("vgg19", "densenet161", "resnet152", "resnet18", "alexnet")
BATCH = 32
THESIS = "thesis"  # the profile that the thesis prints: an RTX 2080
_TABLE = "-table1.csv"


@dataclass(frozen=True, slots=True)
class SimModel:
    """One model with its true times in the simulation."""

    id: ModelId
    size_class: str
    memory_bytes: int
    load_s: float
    run_s: float

    def spec(self) -> ModelSpec:
        """What the core is given of the model beforehand."""
        return ModelSpec(
            self.id,
            self.memory_bytes,
            {Tier.DISK: self.load_s},
            ((BATCH, ANY_GPU_TYPE, self.run_s),),
        )


def profiles() -> list[str]:
    """The GPUs on which Table 1 was measured: `thesis`, and those of our own measurements."""
    names = (entry.name for entry in files("scheduler.sim").joinpath("data").iterdir())
    return sorted(name.removesuffix(_TABLE) for name in names if name.endswith(_TABLE))


def table1(profile: str = THESIS) -> dict[str, SimModel]:
    """The 22 models of Table 1, by name, in the table's order.

    `profile` is one of `profiles()`, or the path of such a table (`*.csv`).
    """
    text = _table_text(profile)
    try:
        return _models_of(text)
    except (KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
        raise BadWorkload(f"profile {profile}: no table of models: {error!r}") from error


def on_profile(models: Iterable[SimModel], profile: str) -> tuple[SimModel, ...]:
    if profile == THESIS:
        return tuple(models)
    table = table1(profile)
    missing = sorted({original(model.id) for model in models} - table.keys())
    if missing:
        raise BadWorkload(f"profile {profile} lacks {', '.join(missing)}")
    return tuple(replace(table[original(model.id)], id=model.id) for model in models)


def original(model: ModelId) -> str:
    """The name in the table of a model or of one of its copies."""
    return model.partition("#")[0]


def _table_text(profile: str) -> str:
    try:
        if profile.endswith(".csv"):
            return Path(profile).read_text(encoding="utf-8")
        if profile in profiles():
            table = files("scheduler.sim").joinpath(f"data/{profile}{_TABLE}")
            return table.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadWorkload(f"profile {profile}: {getattr(error, 'strerror', error)}") from error
    names = ", ".join(profiles())
    raise BadWorkload(f"no profile {profile}; there are {names}, and tables of your own (*.csv)")


def _models_of(text: str) -> dict[str, SimModel]:
    models = {
        row["model"]: SimModel(
            ModelId(row["model"]),
            row["size_class"],
            int(row["gpu_memory_mb"]) * MIB,
            float(row["load_s"]),
            float(row["inference_s"]),
        )
        for row in csv.DictReader(text.splitlines())
    }
    for model in models.values():
        figures = (model.memory_bytes, model.load_s, model.run_s)
        if not all(0 < figure < inf for figure in figures):
            raise ValueError(f"{model.id} has {figures}")
    return models


def working_set(size: int) -> list[SimModel]:
    """One model a function, from the most to the least used, sizes spread evenly.

    The five most used are the thesis's. Each further function takes the next unused model of the
    size class with the fewest so far; when a class has no more, its models come again as separate
    copies (`vgg11#2`), since each function has weights of its own.
    """
    table = table1()
    chosen = [table[name] for name in MOST_USED[:size]]
    classes = list(dict.fromkeys(model.size_class for model in table.values()))
    unused = {name: _endless(table, name) for name in classes}
    counts = {name: sum(model.size_class == name for model in chosen) for name in classes}
    while len(chosen) < size:
        fewest = min(classes, key=lambda name: counts[name])
        chosen.append(next(unused[fewest]))
        counts[fewest] += 1
    return chosen


def _endless(table: dict[str, SimModel], size_class: str) -> Iterator[SimModel]:
    members = [model for model in table.values() if model.size_class == size_class]
    yield from (model for model in members if model.id not in MOST_USED)
    for round_ in count(2):
        for model in members:
            yield replace(model, id=ModelId(f"{model.id}#{round_}"))


GPUS_PER_NODE = 4


@dataclass(frozen=True, slots=True)
class Hardware:
    """The simulated cluster; `overhead_s` holds the GPU in every request, hit or miss.

    A GPU's memory is one, its compute is divided equally among its `slots`. Of a further request in
    a batch, `merged` is the part of its time that the batch saves. A load beside runs takes the
    part `load_takes` of its time from the slot's compute.
    """

    gpus: int = 12
    gpu_memory_mb: int = 7982
    overhead_s: float = 0.0
    slots: int = 1
    merged: float = 0.0
    load_takes: float = 0.0

    def specs(self) -> list[GpuSpec]:
        width = len(str(max(self.gpus - 1, 0)))
        return [
            GpuSpec(
                GpuId(f"gpu{number:0{width}d}"),
                NodeId(f"node{number // GPUS_PER_NODE}"),
                self.gpu_memory_mb * MIB,
                slots=self.parts(f"gpu{number:0{width}d}"),
            )
            for number in range(self.gpus)
        ]

    def run_s(self, alone_s: float, portion: int) -> float:
        """How long a slot takes for a portion of a batch, by the time of one on a whole GPU."""
        return alone_s * self.slots * (portion - self.merged * (portion - 1))

    def parts(self, gpu: str) -> tuple[SlotSpec, ...]:
        """The slots of a GPU; none is named where the whole GPU is one."""
        if self.slots == 1:
            return ()
        return tuple(SlotSpec(SlotId(f"{gpu}.{number}")) for number in range(self.slots))
