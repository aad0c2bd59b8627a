"""A progress bar for long runs, on a terminal's standard error only."""

import sys
from types import TracebackType

_WIDTH = 40


class ProgressBar:
    """`with Bar("runs", shown=True) as bar: ... bar.update(done, total)`."""

    def __init__(self, unit: str, *, shown: bool) -> None:
        self._unit = unit
        self._shown = shown and sys.stderr.isatty()

    def __enter__(self) -> "ProgressBar":
        return self

    def update(self, done: int, total: int) -> None:
        """Draw the bar."""
        if self._shown:
            full = _WIDTH * done // max(1, total)
            bar = "#" * full + "." * (_WIDTH - full)
            print(f"\r[{bar}] {done}/{total} {self._unit}", end="", file=sys.stderr, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
