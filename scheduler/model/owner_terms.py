"""What a namespace, or one function of it, may use of the cluster."""

from math import isfinite
from typing import NamedTuple


class OwnerTerms(NamedTuple):
    """The share, the urgency and the quotas of one owner of requests; None: no limit.

    Where requests wait, owners get GPU time in proportion to their `weight`. A request of a
    higher `priority` goes before those that came a bounded time earlier. The quotas: `gpu_s`
    seconds of GPU time in any `window_s`, `resident_bytes` in GPU memory, `leases` at a time, and
    `waiting` requests.
    """

    weight: float = 1.0
    priority: int = 0
    gpu_s: float | None = None
    window_s: float = 60.0
    resident_bytes: int | None = None
    leases: int | None = None
    waiting: int | None = None


def problem_of(terms: OwnerTerms) -> str:
    """What is wrong with these terms; empty if nothing is."""
    if not (isfinite(terms.weight) and terms.weight > 0.0):
        return f"weight must be above 0, not {terms.weight!r}"
    if not (isfinite(terms.window_s) and terms.window_s > 0.0):
        return f"window_s must be above 0, not {terms.window_s!r}"
    for quota in ("gpu_s", "resident_bytes", "leases", "waiting"):
        most = getattr(terms, quota)
        if most is not None and not (isfinite(most) and most >= 0):
            return f"{quota} must be 0 or more, not {most!r}"
    return ""
