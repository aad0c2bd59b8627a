"""Log lines that strangers can cause at will: bounded, however often somebody comes or calls."""

import asyncio
import logging
from dataclasses import dataclass

_PAUSE_S = 60.0
# Beyond so many causes, the one that has been quiet for the longest is forgotten.
_MOST_CAUSES = 1_000


@dataclass(slots=True)
class _Pause:
    end_s: float
    left_out: int = 0


class StrangerLog:
    """Logs one line a minute of each cause, with how many were left out; all others as DEBUG.

    Each line costs a stranger one request, and would push out the lines that an operator needs.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._pauses: dict[str, _Pause] = {}

    def warn(self, text: str, *values: object) -> None:
        """Log what a stranger did, in the event loop's time."""
        self.log(logging.WARNING, "", text, *values)

    def log(self, level: int, cause: str, text: str, *values: object) -> None:
        """Log what happened for this cause, which no stranger words."""
        now_s = asyncio.get_running_loop().time()
        pause = self._pauses.pop(cause, None)
        if pause is not None and now_s < pause.end_s:
            self._pauses[cause] = pause
            if self._log.isEnabledFor(logging.DEBUG):
                self._log.debug(text, *values)
            else:
                pause.left_out += 1
            return
        left_out = 0 if pause is None else pause.left_out
        more = f" ({left_out} lines like this one were left out)" if left_out else ""
        self._log.log(level, f"{text}%s", *values, more)
        self._pauses[cause] = _Pause(now_s + _PAUSE_S)
        if len(self._pauses) > _MOST_CAUSES:
            del self._pauses[next(iter(self._pauses))]
