"""Styled lines, cut to a width and then painted, and small pictures in characters; pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from common.foreign_text import plain


class StyledText(NamedTuple):
    """Text in one style, which is the parameter of the escape sequence ESC [ ... m, or empty."""

    text: str
    style: str = ""


StyledLine = Sequence[StyledText]

BOLD, DIM, REVERSED = "1", "2", "7"
RED, GREEN, YELLOW, CYAN = "31", "32", "33", "36"
_RESET = "\x1b[0m"
# Those of the 256 colours on which black text is readable, and which differ from each other.
_BLOCKS = (67, 73, 108, 110, 138, 139, 144, 146, 173, 174, 179, 180, 72, 96, 103, 131)


def cut(line: Iterable[StyledText], width: int) -> list[StyledText]:
    pieces: list[StyledText] = []
    for span in line:
        if width <= 0:
            break
        text = span.text[:width]
        width -= len(text)
        pieces.append(StyledText(text, span.style))
    return pieces


def padded(line: Iterable[StyledText], width: int, style: str) -> list[StyledText]:
    pieces = [
        StyledText(span.text, f"{span.style};{style}" if span.style else style)
        for span in cut(line, width)
    ]
    return [*pieces, StyledText(" " * (width - sum(len(span.text) for span in pieces)), style)]


def painted(line: Iterable[StyledText], *, colours: bool) -> str:
    if not colours:
        return "".join(span.text for span in line).rstrip()
    return "".join(
        f"\x1b[{span.style}m{span.text}{_RESET}" if span.style and span.text else span.text
        for span in line
    )


_STEPS = "▁▂▃▄▅▆▇█"
_FREE, _TAKEN = "·", "▒"
_LEAST_LABEL = 4


def memory_bar(gpu: Mapping[str, Any], width: int) -> list[StyledText]:
    """The models to scale, other programs' memory, and free memory, in `width` characters."""
    total = max(1, gpu["total_bytes"])
    blocks: list[StyledText] = []
    filled, at_bytes = 0, 0
    for resident in gpu["residents"]:
        at_bytes += resident["bytes"]
        cells = min(width, round(width * at_bytes / total)) - filled
        filled += cells
        if cells:
            colour = _BLOCKS[crc32(resident["model"].encode()) % len(_BLOCKS)]
            blocks.append(StyledText(_block(resident, cells), f"30;48;5;{colour}"))
    taken = min(width - filled, round(width * gpu["withheld_bytes"] / total))
    blocks.append(StyledText(_TAKEN * taken, DIM))
    blocks.append(StyledText(_FREE * (width - filled - taken), DIM))
    return blocks


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
    numbers = [value for value in shown if value is not None]
    top = most or max(numbers, default=0.0)
    return "".join(" " if value is None else _step(value, top) for value in shown)


def _step(value: float, top: float) -> str:
    if top <= 0:
        return _STEPS[0]
    return _STEPS[min(len(_STEPS) - 1, max(0, int(value / top * len(_STEPS))))]
