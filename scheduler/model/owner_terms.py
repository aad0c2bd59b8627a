"""What a namespace, or one function of it, may use of the cluster."""

import re
from collections.abc import Mapping
from math import isfinite

from scheduler.model.errors import BadValue
from scheduler.model.values import Number, Value


class OwnerTerms(Value, frozen=True):
    """The share, the urgency and the quotas of one owner of requests; None: no limit.

    Where requests wait, owners get GPU time in proportion to their `weight`. A request of a
    higher `priority` goes before those that came a bounded time earlier. The quotas: `gpu_s`
    seconds of GPU time in any `window_s`, `resident_bytes` in GPU memory, `leases` at a time, and
    `waiting` requests.
    """

    weight: Number = 1.0
    priority: int = 0
    gpu_s: Number | None = None
    window_s: Number = 60.0
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


LONGEST_OWNER = 512
_OWNER = re.compile(r"{name}(/{name})?".format(name="[a-zA-Z0-9_][-a-zA-Z0-9_.]*"))
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e6
MOST_PRIORITY = 1_000_000
MOST_GPU_S = 1e9
LEAST_WINDOW_S, MOST_WINDOW_S = 1.0, 86_400.0
MOST_BYTES = 1 << 60
MOST_COUNT = 1_000_000

# The range of every number, by the field of `OwnerTerms`.
RANGES: Mapping[str, tuple[float, float]] = {
    "weight": (LEAST_WEIGHT, MOST_WEIGHT),
    "priority": (-MOST_PRIORITY, MOST_PRIORITY),
    "gpu_s": (1e-3, MOST_GPU_S),
    "window_s": (LEAST_WINDOW_S, MOST_WINDOW_S),
    "resident_bytes": (1, MOST_BYTES),
    "leases": (1, MOST_COUNT),
    "waiting": (1, MOST_COUNT),
}


def check_owner(owner: str) -> str:
    """The owner as it came; BadValue if it is neither `namespace` nor `namespace/function`."""
    if len(owner) > LONGEST_OWNER or not _OWNER.fullmatch(owner):
        raise BadValue(
            f"owner: {owner[:80]!r}: NAMESPACE or NAMESPACE/FUNCTION is expected, "
            f"of at most {LONGEST_OWNER} characters"
        )
    return owner


def is_function(owner: str) -> bool:
    return "/" in owner


def check_number(field: str, value: float) -> None:
    """BadValue unless this field of terms may have the value."""
    least, most = RANGES[field]
    if not least <= value <= most:  # nor is NaN
        raise BadValue(f"from {least:g} to {most:g} is expected", (field,))


def check_terms(terms: OwnerTerms) -> OwnerTerms:
    """The terms as they came; BadValue names the field that is out of bounds."""
    for field in RANGES:
        value = getattr(terms, field)
        if value is not None:
            check_number(field, value)
    return terms
