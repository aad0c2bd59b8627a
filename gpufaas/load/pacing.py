"""A clock that rings to the microsecond: event loops round their timers to milliseconds."""

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


class Clock:
    """Calls `ring` at the moments of `time.monotonic` that it is set to; close it at the end."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._timer, self._rang)

    def set(self, at_s: float) -> None:
        """Ring then; a moment that has passed rings at once."""
        at_ns = max(1, int(at_s * _NS))  # 0 would switch it off
        setting = _Setting(0, 0, *divmod(at_ns, _NS))
        if _LIBC.timerfd_settime(self._timer, _ABSOLUTE, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """It rings no more."""
        self._loop.remove_reader(self._timer)
        os.close(self._timer)

    def _rang(self) -> None:
        try:
            os.read(self._timer, 8)
        except BlockingIOError:  # it was set anew between its ring and us
            return
        self._ring()
