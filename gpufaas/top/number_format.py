"""Numbers with units; pure."""

import time

from common.numerals import format_size

_MINUTE_S, _HOUR_S = 60, 3600


def seconds(value: float | None) -> str:
    """A duration to three digits."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < _MINUTE_S:
        return f"{value:.3g} s"
    if value < _HOUR_S:
        return f"{value // _MINUTE_S:.0f} min {value % _MINUTE_S:.0f} s"
    return f"{value // _HOUR_S:.0f} h {value % _HOUR_S // _MINUTE_S:.0f} min"


def share(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:.1f} %"


def rate(value: float | None) -> str:
    """A rate a second."""
    return "-" if value is None else f"{value:.3g}/s"


def size(value: int) -> str:
    """A number of bytes."""
    return format_size(value)


def clock(at_s: float) -> str:
    """A moment in local time."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))
