"""Names of signals."""

import signal


def signal_name(number: int) -> str:
    """The signal's name, such as SIGSEGV; Python has none for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
