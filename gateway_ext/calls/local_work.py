"""What a function says about work of its models that runs without a GPU; pure.

The lines are the function's own text: whoever shows them shows them as text.
"""

_MOST_LINES = 20
_MOST_CHARACTERS = 240
_MOST_BYTES = 8 << 10  # of one report
_TRACING = "tracing: "


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
        lasting = [text for text in shown if text and not text.startswith(_TRACING)]
        known = dict.fromkeys((*self.lines, *lasting))
        if len(known) > len(self.lines):  # the page compares by identity
            self.lines = tuple(known)[:_MOST_LINES]


def tracing_line(report: bytes) -> bytes:
    """What the caller is told: that the call ran on the processor while a graph was traced."""
    first = _printable(report[:_MOST_CHARACTERS].decode("latin-1").partition("|")[0])
    return first.encode() if first.startswith(_TRACING) else b""


def _printable(text: str) -> str:
    shown = text[:_MOST_CHARACTERS]
    return "".join(character if " " <= character <= "~" else "?" for character in shown)
