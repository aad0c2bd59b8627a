"""The functions of chapter 5: one model each, of a size and times like Table 1's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, linear_regression

from cache_manager.model.ids import MIB
from scheduler.sim.model_catalogue import SimModel, table1

# Memory is real here, so that everything is so many times smaller than on the thesis's GPUs.
SMALLER = 60
GPU_MEMORY_BYTES = 7982 * MIB // SMALLER

_IMAGE = "chapter"
_ROW_BYTES = 64 * 4
_GIB = 1024 * MIB

_HANDLER = '''"""Looks up a few rows of one table, which fills its GPU memory as a model would."""

import os

import torch

torch.manual_seed(int(os.environ["SEED"]))
model = torch.nn.Embedding(int(os.environ["ROWS"]), 64).eval().cuda()
words = torch.arange(8).cuda()


def handle(event, context):
    with torch.no_grad():
        return {"sum": float(model(words).sum())}
'''


@dataclass(frozen=True, slots=True)
class EmulatedLine:
    """The times that emulated GPUs take: a load by its size, and every run the same."""

    fixed_s: float
    s_per_gib: float
    run_s: float

    def of(self, model: SimModel) -> SimModel:
        """The model with these times."""
        load_s = self.fixed_s + self.s_per_gib * model.memory_bytes / _GIB
        return replace(model, load_s=load_s, run_s=self.run_s)

    def options(self, speed: float) -> tuple[str, ...]:
        """How `gpufaas up` is told, for GPUs that are `speed` times as fast."""
        fixed_s, run_s = self.fixed_s / speed, self.run_s / speed
        per_gib_s = self.s_per_gib * SMALLER / speed
        return (
            *("--emulate-load", f"{fixed_s:.6f}+{per_gib_s:.6f}/GiB"),
            *("--emulate-run", f"{run_s:.6f}"),
        )


def emulated_line() -> EmulatedLine:
    """The line through Table 1's loads by size, and the average of its inferences."""
    models = list(table1().values())
    sizes = [model.memory_bytes / _GIB for model in models]
    slope, intercept = linear_regression(sizes, [model.load_s for model in models])
    return EmulatedLine(intercept, slope, fmean(model.run_s for model in models))


def write_build(folder: Path) -> None:
    """The build's folder, as `faas-cli build --shrinkwrap` leaves it."""
    build = folder / _IMAGE / "function"
    build.mkdir(parents=True)
    (build / "handler.py").write_text(_HANDLER, encoding="utf-8")


def deployments(
    models: Sequence[SimModel], namespaces: Sequence[str] = ()
) -> list[dict[str, object]]:
    """A function for each model; all its calls wait in the scheduler, however long.

    Each is in the namespace with its model's number, or all are in the default one.
    """
    found = [_deployment(number, model) for number, model in enumerate(models)]
    for deployment, namespace in zip(found, namespaces, strict=bool(namespaces)):
        deployment["namespace"] = namespace
    return found


def addresses(count: int, namespaces: Sequence[str] = ()) -> tuple[str, ...]:
    """How the functions of so many models are called."""
    names = [_function_name(number) for number in range(count)]
    if not namespaces:
        return tuple(names)
    return tuple(f"{name}.{of}" for name, of in zip(names, namespaces, strict=True))


def _function_name(number: int) -> str:
    return f"chapter-{number:02d}"


def _deployment(number: int, model: SimModel) -> dict[str, object]:
    weights_bytes = model.memory_bytes // SMALLER
    return {
        "service": _function_name(number),
        "image": _IMAGE,
        "envVars": {
            "SEED": str(number),
            "ROWS": str(weights_bytes // _ROW_BYTES),
            "GPUFAAS_THREADS": "16",
        },
        "labels": {"com.openfaas.scale.max": "1"},
        "annotations": {
            "com.gpufaas.enabled": "true",
            "com.gpufaas.batch": "off",
            "com.gpufaas.timeout": "60m",
            "com.gpufaas.max-wait": "29m",
        },
    }
