"""Lines of text with styles: cut to a width first, then painted for a terminal; pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32


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


def block_style(name: str) -> str:
    """The colour of a model's block, which depends on its name alone."""
    return f"30;48;5;{_BLOCKS[crc32(name.encode()) % len(_BLOCKS)]}"


def cut(line: Iterable[StyledText], width: int) -> list[StyledText]:
    """The line, cut to a width."""
    found: list[StyledText] = []
    for span in line:
        if width <= 0:
            break
        text = span.text[:width]
        width -= len(text)
        found.append(StyledText(text, span.style))
    return found


def padded(line: Iterable[StyledText], width: int, style: str) -> list[StyledText]:
    """The line, padded to a width, with this style added."""
    found = [
        StyledText(span.text, f"{span.style};{style}" if span.style else style)
        for span in cut(line, width)
    ]
    return [*found, StyledText(" " * (width - sum(len(span.text) for span in found)), style)]


def painted(line: Iterable[StyledText], *, colours: bool) -> str:
    """The line with escape sequences, or as plain text."""
    if not colours:
        return "".join(span.text for span in line).rstrip()
    return "".join(
        f"\x1b[{span.style}m{span.text}{_RESET}" if span.style and span.text else span.text
        for span in line
    )
