"""What the shim does in a process that instances are forked from.

It waits for its traces, since it has one thread when it is forked, and no connection: no fork may
share a session. An instance then traces in the background, as any does.
"""

from collections.abc import Callable
from typing import NamedTuple


class ForkSteps(NamedTuple):
    """The steps of one part of the shim: before a fork, and in an instance."""

    import_tracing: Callable[[], None]
    close_sessions: Callable[[], None]
    trace_in_background: Callable[[], None]


_STEPS: list[ForkSteps] = []


def register(steps: ForkSteps) -> None:
    """Have these steps taken in a template."""
    _STEPS.append(steps)


def import_tracing() -> None:
    """Import what traces need: more than a second that no fork then spends."""
    for steps in _STEPS:
        steps.import_tracing()


def close_sessions() -> None:
    """End all sessions and leases; the next GPU call opens them anew."""
    for steps in _STEPS:
        steps.close_sessions()


def trace_in_background() -> None:
    """Let calls run locally while a new graph is traced, and be answered by the known ones."""
    for steps in _STEPS:
        steps.trace_in_background()
