"""What a namespace, or one function of it, may use of the cluster."""

import re
from collections.abc import Mapping

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


_LONGEST_OWNER = 512
_OWNER = re.compile(r"{name}(/{name})?".format(name="[a-zA-Z0-9_][-a-zA-Z0-9_.]*"))
_MOST_COUNT = 1_000_000

# The range of every number, by the field of `OwnerTerms`.
RANGES: Mapping[str, tuple[float, float]] = {
    "weight": (1e-3, 1e6),
    "priority": (-1_000_000, 1_000_000),
    "gpu_s": (1e-3, 1e9),
    "window_s": (1.0, 86_400.0),
    "resident_bytes": (1, 1 << 60),
    "leases": (1, _MOST_COUNT),
    "waiting": (1, _MOST_COUNT),
}


def check_owner(owner: str) -> str:
    """The owner as it came; BadValue if it is neither `namespace` nor `namespace/function`."""
    if len(owner) > _LONGEST_OWNER or not _OWNER.fullmatch(owner):
        raise BadValue(
            f"owner: {owner[:80]!r}: NAMESPACE or NAMESPACE/FUNCTION is expected, "
            f"of at most {_LONGEST_OWNER} characters"
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
