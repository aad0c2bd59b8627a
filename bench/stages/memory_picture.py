"""Memory over time while a model steps down, as a picture; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.stages.memory_samples import MemorySample

_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#999999")
_LABELS = ("on the GPU: weights and context", "on the GPU: context alone", "host memory", "disk")
_MIB = 1 << 20


def draw(samples: Sequence[MemorySample], stay_s: float, path: Path) -> None:
    """One area for each kind of memory, on one another."""
    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    panel = figure.subplots()
    at_s = [each.at_s for each in samples]
    areas = [
        [each.models_bytes / _MIB for each in samples],
        [each.contexts_bytes / _MIB for each in samples],
        [each.host_bytes / _MIB for each in samples],
        [each.disk_bytes / _MIB for each in samples],
    ]
    panel.stackplot(at_s, areas, labels=_LABELS, colors=_COLOURS, step="post")
    panel.set_title(f"One model after its last call, {stay_s:g} s a stage")
    panel.set_xlabel("seconds after the call")
    panel.set_ylabel("MiB")
    panel.set_xlim(left=0)
    panel.legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
