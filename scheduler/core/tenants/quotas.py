"""Which requests are refused on arrival, because their owner has as much as its quotas allow."""

from scheduler.core.state.pending import Bundle
from scheduler.core.tenants.owner_table import both
from scheduler.core.tenants.owners import FunctionOwner, Owner


def refused_by(reason: str) -> tuple[str, str]:
    """The owner and the quota that the reason of a refusal names."""
    _, quota, _, rest = reason.split(" ", 3)
    return rest.partition(": ")[0], quota


# So many calls of a namespace may wait for GPU time.
MOST_PAUSED = 1_000


class QuotaRefusal:
    """Why a request is refused, by which quota of whom; and in how long there may be room."""

    __slots__ = ("again_s", "reason")

    def __init__(self, owner: Owner, quota: str, detail: str, again_s: float | None) -> None:
        self.reason = f"quota {quota} of {owner.name or 'functions without a namespace'}: {detail}"
        self.again_s = again_s


def refusal(
    function: FunctionOwner, bundle: Bundle, expected_s: float, now: float, *, goes_on: bool
) -> QuotaRefusal | None:
    """The first quota, of the function or of its namespace, that one more request exceeds.

    Of calls that go on, whose work so far would be lost, as many again may wait, and some for GPU
    time as well.
    """
    pauses = goes_on and function.space.paused < MOST_PAUSED
    too_large = too_many_bytes(function, bundle)
    if too_large is not None:
        return too_large
    for owner in both(function):
        terms = owner.terms
        if terms.waiting is not None and owner.waiting >= terms.waiting * (1 + goes_on):
            detail = f"{owner.waiting} of {terms.waiting} requests wait"
            return QuotaRefusal(owner, "waiting", detail, None)
        if terms.gpu_s is not None and not (pauses and terms.gpu_s > 0.0):
            found = _gpu_time(owner, terms.gpu_s, expected_s, now)
            if found is not None:
                return found
    return None


def lacks_gpu_time(function: FunctionOwner, expected_s: float, now: float) -> bool:
    """Whether one more request of so many seconds would exceed a quota of GPU time."""
    for owner in both(function):
        most_s = owner.terms.gpu_s
        if most_s is not None and _gpu_time(owner, most_s, expected_s, now) is not None:
            return True
    return False


def too_many_bytes(function: FunctionOwner, bundle: Bundle) -> QuotaRefusal | None:
    """Whether these models alone need more than the function or its namespace may have."""
    for owner in both(function):
        most_bytes = owner.terms.resident_bytes
        if most_bytes is not None and bundle.bytes > most_bytes:
            detail = f"its models need {bundle.bytes} bytes of {most_bytes}"
            return QuotaRefusal(owner, "resident_bytes", detail, None)
    return None


def is_over_gpu_s(owner: Owner, now: float) -> bool:
    """Whether an owner has used all the GPU time that it may have."""
    most_s = owner.terms.gpu_s
    return most_s is not None and owner.used_s(now) >= most_s


def _gpu_time(owner: Owner, most_s: float, expected_s: float, now: float) -> QuotaRefusal | None:
    """What was used, what is accepted and one more request must not exceed the quota together.

    A request that alone exceeds it may begin where nothing was used or accepted: its estimate may
    be wrong, and only a run can correct it.
    """
    used_s, to_come_s = owner.used_s(now), owner.to_come_s(now)
    short_s = used_s + to_come_s + expected_s - most_s
    if short_s <= 0.0 or (most_s > 0.0 and used_s <= 0.0 and not owner.busy):
        return None
    window = owner.window
    again_s = window.frees_in_s(short_s, now) if window is not None else None
    detail = (
        f"{used_s:.1f} of {most_s:g} s of GPU time used in {owner.terms.window_s:g} s, "
        f"{to_come_s:.1f} s accepted, {expected_s:.1f} s more asked for"
    )
    return QuotaRefusal(owner, "gpu_s", detail, again_s)
