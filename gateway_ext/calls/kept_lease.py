"""One lease that outlives its first call: what runs under it, and what is to be reported of it."""

from typing import NamedTuple

from cache_manager.model.ids import ModelId
from scheduler.api import CallEnd, LeaseId, LeaseUse, LeaseUsed
from scheduler.client.granted_lease import GrantedLease


class LeaseKind(NamedTuple):
    """Calls of one kind can follow one another under one lease."""

    function: str
    models: tuple[ModelId, ...]


class KeptLease:
    """One lease that stands; `use` is the call that runs under it.

    `instance` is the function's instance that used it last, and need not claim it again.
    """

    __slots__ = (
        "granted", "lines", "kind", "instance", "until_s", "slice_until_s", "calls_left",
        "for_a_slice", "recalled", "free_s", "use", "use_known", "uses", "ends",
    )  # fmt: skip

    def __init__(self, kind: LeaseKind, granted: GrantedLease, first: LeaseUse) -> None:
        terms = granted.placement.stands
        assert terms is not None, "only such leases are kept"
        self.kind = kind
        self.granted = granted
        self.lines = granted.header_lines()
        self.until_s = first.began_s + terms.seconds
        self.slice_until_s = first.began_s + terms.slice_s
        self.calls_left = terms.calls - 1
        self.for_a_slice = terms.for_a_slice
        self.recalled = False
        self.free_s = 0.0
        self.instance = ""
        self.use: LeaseUse | None = first
        self.use_known = True  # the scheduler placed the first call itself
        self.uses: list[LeaseUse] = []
        self.ends: list[CallEnd] = []

    @property
    def id(self) -> LeaseId:
        return self.granted.placement.lease

    def begin(self, use: LeaseUse) -> None:
        """The next call runs under this lease."""
        self.use, self.use_known = use, False
        self.calls_left -= 1

    def end(self, now_s: float) -> None:
        """The call has ended."""
        use, self.use = self.use, None
        if use is not None and self.use_known:
            self.ends.append(CallEnd(use.request, now_s))
        elif use is not None:
            self.uses.append(use._replace(ended_s=now_s))

    def is_spent(self, now_s: float) -> bool:
        """Whether no further call may begin under it."""
        until_s = self.slice_until_s if self.recalled else self.until_s
        return self.calls_left <= 0 or now_s >= until_s

    @property
    def may_idle(self) -> bool:
        """Whether it may be kept while no call uses it."""
        return not (self.recalled or self.for_a_slice)

    def report(self, began_before_s: float) -> LeaseUsed | None:
        """What ran since the last report, with a call that began before then and still runs."""
        use = self.use
        if use is not None and not self.use_known and use.began_s <= began_before_s:
            self.uses.append(use)
            self.use_known = True
        if not self.uses and not self.ends:
            return None
        kind, uses, ends = self.kind, tuple(self.uses), tuple(self.ends)
        self.uses.clear()
        self.ends.clear()
        return LeaseUsed(self.id, kind.function, uses, ends)
