"""The settings of instances that all managed providers share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedSettings:
    """Bounds on the life of an instance and on the log of a function.

    `start_timeout_s` bounds the time until an instance is ready, `drain_s` the time that calls in
    flight get before it is stopped, `stop_s` the time between asking it to end and killing it.
    An instance that has died after a long life is replaced at once, another one after
    `first_pause_s`, which doubles up to `longest_pause_s`.
    """

    log_bytes: int = 2 << 20
    start_timeout_s: float = 600.0
    drain_s: float = 30.0
    stop_s: float = 30.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 60.0
