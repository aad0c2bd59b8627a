"""Small pictures in characters: a GPU's memory with its models, and a series of values."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.foreign_text import plain
from gpufaas.top.styled_text import DIM, StyledText, block_style

_STEPS = "▁▂▃▄▅▆▇█"
_FREE, _TAKEN = "·", "▒"
_LEAST_LABEL = 4


def memory_bar(gpu: Mapping[str, Any], width: int) -> list[StyledText]:
    """The models to scale, other programs' memory, and free memory, in `width` characters."""
    total = max(1, gpu["total_bytes"])
    found: list[StyledText] = []
    filled, at_bytes = 0, 0
    for resident in gpu["residents"]:
        at_bytes += resident["bytes"]
        cells = min(width, round(width * at_bytes / total)) - filled
        filled += cells
        if cells:
            found.append(StyledText(_block(resident, cells), block_style(resident["model"])))
    taken = min(width - filled, round(width * gpu["withheld_bytes"] / total))
    found.append(StyledText(_TAKEN * taken, DIM))
    found.append(StyledText(_FREE * (width - filled - taken), DIM))
    return found


def _block(resident: Mapping[str, Any], cells: int) -> str:
    """One model's block: its marks and as much of its label as fits."""
    marks = "".join(
        mark for mark, name in (("*", "pinned"), ("~", "loading"), ("!", "busy")) if resident[name]
    )
    label = plain(resident["label"])
    text = f"{marks}{label}" if cells >= _LEAST_LABEL else marks or "#"
    # This border separates neighbours without colours.
    return text[: cells - 1].ljust(cells - 1, "#") + "|" if cells > 1 else text[:1]


def sparkline(values: Sequence[float | None], width: int, most: float | None = None) -> str:
    """The last `width` values as bars; a missing value is a space."""
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None]
    top = most or max(known, default=0.0)
    return "".join(" " if value is None else _step(value, top) for value in shown)


def _step(value: float, top: float) -> str:
    if top <= 0:
        return _STEPS[0]
    return _STEPS[min(len(_STEPS) - 1, max(0, int(value / top * len(_STEPS))))]
