"""A timer with microsecond resolution; event loops round theirs to milliseconds."""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_LIBC = ctypes.CDLL(None, use_errno=True)
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_NS = 1_000_000_000


class _Setting(ctypes.Structure):
    """The kernel's `itimerspec`."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class PreciseTimer:
    """Calls `ring` at set moments of `time.monotonic`; to be closed at the end."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._timer, self._rang)

    def set(self, at_s: float) -> None:
        """Ring at this moment, or at once if it has passed."""
        at_ns = max(1, int(at_s * _NS))  # 0 would disarm the timer
        setting = _Setting(0, 0, *divmod(at_ns, _NS))
        if _LIBC.timerfd_settime(self._timer, _ABSOLUTE, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Disarm and close the timer."""
        self._loop.remove_reader(self._timer)
        os.close(self._timer)

    def _rang(self) -> None:
        try:
            os.read(self._timer, 8)
        except BlockingIOError:  # the timer was set again after it rang
            return
        self._ring()
