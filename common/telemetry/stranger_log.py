"""Log lines about whoever reaches a socket: bounded, however often somebody comes."""

import asyncio
import logging

_PAUSE_S = 60.0


class StrangerLog:
    """Logs one warning a minute, with how many were left out; all others on the level DEBUG.

    Each line costs a stranger one connection, and would push out the lines that an operator needs.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_s = float("-inf")
        self._left_out = 0

    def warn(self, text: str, *values: object) -> None:
        """Log what a stranger did, in the event loop's time."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_s:
            self._left_out += 1
            self._log.debug(text, *values)
            return
        more = f" ({self._left_out} lines like this one were left out)" if self._left_out else ""
        self._log.warning(f"{text}%s", *values, more)
        self._next_s, self._left_out = now_s + _PAUSE_S, 0
