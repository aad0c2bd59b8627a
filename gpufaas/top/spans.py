"""Lines of text with styles: cut to a width first, then painted for a terminal; pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32


class Span(NamedTuple):
    """Some text in one style; a style is what goes between ESC [ and m, or nothing."""

    text: str
    style: str = ""


Line = Sequence[Span]

BOLD, DIM, REVERSED = "1", "2", "7"
RED, GREEN, YELLOW, BLUE, CYAN = "31", "32", "33", "34", "36"
_RESET = "\x1b[0m"
# Of the 256 colours those that both black and white can be read on, and beside each other.
_BLOCKS = (67, 73, 108, 110, 138, 139, 144, 146, 173, 174, 179, 180, 72, 96, 103, 131)


def plain(text: object) -> str:
    """Text of somebody else's: what would steer the terminal is taken out of it."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def block_style(name: str) -> str:
    """The colour of a model's block: the same one everywhere and at all times."""
    return f"30;48;5;{_BLOCKS[crc32(name.encode()) % len(_BLOCKS)]}"


def cut(line: Iterable[Span], width: int) -> list[Span]:
    """As much of the line as there is room for."""
    found: list[Span] = []
    for span in line:
        if width <= 0:
            break
        text = span.text[:width]
        width -= len(text)
        found.append(Span(text, span.style))
    return found


def padded(line: Iterable[Span], width: int, style: str) -> list[Span]:
    """The line over the whole width, in this style besides its own."""
    found = [
        Span(span.text, f"{span.style};{style}" if span.style else style)
        for span in cut(line, width)
    ]
    return [*found, Span(" " * (width - sum(len(span.text) for span in found)), style)]


def painted(line: Iterable[Span], *, colours: bool) -> str:
    """As a terminal is sent it."""
    if not colours:
        return "".join(span.text for span in line).rstrip()
    return "".join(
        f"\x1b[{span.style}m{span.text}{_RESET}" if span.style and span.text else span.text
        for span in line
    )
