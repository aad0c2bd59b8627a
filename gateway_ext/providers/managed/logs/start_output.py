"""What an instance writes until it is ready: lines that a failed start had too are held back."""

from collections.abc import Sequence

from gateway_ext.model import LogLine

_MOST_BYTES = 256 << 10  # of lines that are remembered; longer output is never held back
_LINE_BYTES = 100  # of memory that a line takes, beside its text


class StartOutput:
    """The lines of one start, compared with those of the start `before` it."""

    def __init__(self, before: Sequence[str]) -> None:
        self.texts: list[str] = []
        self._before = before
        self._held: list[LogLine] = []
        self._bytes = 0
        self._differs = not before

    @property
    def repeats(self) -> bool:
        """Whether it has written what the start before it had written, no more and no less."""
        return not self._differs and len(self.texts) == len(self._before)

    def pass_on(self, lines: Sequence[LogLine]) -> Sequence[LogLine]:
        """The lines that are to be stored now, as these have come."""
        self._bytes += sum(len(line.text) + _LINE_BYTES for line in lines)
        if self._bytes > _MOST_BYTES:
            self._differs, self.texts = True, []
            return [*self.release(), *lines]
        at, texts = len(self.texts), [line.text for line in lines]
        self.texts += texts
        self._differs = self._differs or self._before[at : at + len(texts)] != texts
        if self._differs:
            return [*self.release(), *lines]
        self._held += lines
        return ()

    def release(self) -> list[LogLine]:
        """The lines that were held back."""
        held, self._held = self._held, []
        return held
