"""What a function says about work of its models that runs without a GPU; pure.

The lines are the function's own text: whoever shows them shows them as text.
"""

_MOST_LINES = 20
_MOST_CHARACTERS = 240
_MOST_BYTES = 8 << 10  # of one report


class LocalWork:
    """The lines that a function has reported since it was deployed; the first ones stay."""

    __slots__ = ("lines",)

    def __init__(self) -> None:
        self.lines: tuple[str, ...] = ()

    def saw(self, report: bytes) -> None:
        """Take the lines of one answer."""
        if len(self.lines) >= _MOST_LINES:
            return
        texts = report[:_MOST_BYTES].decode("latin-1").split("|")
        shown = [_printable(text.strip()) for text in texts]
        known = dict.fromkeys((*self.lines, *filter(None, shown)))
        if len(known) > len(self.lines):  # the page compares by identity
            self.lines = tuple(known)[:_MOST_LINES]


def _printable(text: str) -> str:
    shown = text[:_MOST_CHARACTERS]
    return "".join(character if " " <= character <= "~" else "?" for character in shown)
