"""How a program of tests or benches ends when it is asked to."""

import signal
import sys


def end_by_exception() -> None:
    """Have SIGTERM end this program by an exception, so that all it started is ended, and once."""
    signal.signal(signal.SIGTERM, _end)


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)
