"""One lease that outlives its first call: what runs under it, and what is to be reported of it."""

from typing import NamedTuple

from cache_manager.model.ids import ModelId
from scheduler.api import CallEnd, LeaseId, LeaseUse, LeaseUsed, RequestId
from scheduler.client.lease_client import GrantedLease


class LeaseKind(NamedTuple):
    """Calls of one kind can follow one another under one lease.

    `together` is how many of them the function's handler is given at a time: they share the lease.
    """

    function: str
    models: tuple[ModelId, ...]
    together: int = 1

    @property
    def is_shared(self) -> bool:
        return self.together > 1


class KeptLease:
    """One lease that stands, and the calls that run under it.

    `instance` is the function's instance that used it last, and need not claim it again. `promised`
    counts the calls that were given the lease and have not resumed. It is not `clean` once a call
    broke off, since its function may still be at work.
    """

    __slots__ = (
        "granted", "lines", "kind", "instance", "until_s", "slice_until_s", "calls_left",
        "for_a_slice", "recalled", "free_s", "promised", "clean", "uses", "ends", "_running",
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
        self.promised = 0
        self.clean = True
        self.uses: list[LeaseUse] = []
        self.ends: list[CallEnd] = []
        # The calls that run, and the use by which they are still to be reported.
        self._running: dict[RequestId, LeaseUse | None] = {}
        self._running[first.request] = None  # the scheduler placed the first call itself

    @property
    def id(self) -> LeaseId:
        return self.granted.placement.lease

    @property
    def members(self) -> int:
        """How many calls run under it, or are about to."""
        return len(self._running) + self.promised

    def begin(self, use: LeaseUse) -> None:
        """One more call runs under this lease."""
        self._running[use.request] = use
        self.calls_left -= 1

    def end(self, request: RequestId, now_s: float) -> None:
        """The call has ended."""
        use = self._running.pop(request)
        if use is None:
            self.ends.append(CallEnd(request, now_s))
        else:
            self.uses.append(use._replace(ended_s=now_s))

    def is_spent(self, now_s: float) -> bool:
        """Whether no further call may begin under it."""
        until_s = self.slice_until_s if self.recalled else self.until_s
        return self.calls_left <= self.promised or now_s >= until_s

    def has_room(self, now_s: float, *, gathers: bool) -> bool:
        """Whether one more call may run under it; if it `gathers`, also those of a second batch."""
        together = self.kind.together
        most = 2 * together if self.kind.is_shared and gathers else together
        return self.members < most and self.clean and not self.is_spent(now_s)

    @property
    def may_idle(self) -> bool:
        """Whether it may be kept while no call uses it."""
        return not (self.recalled or self.for_a_slice)

    @property
    def has_unknown(self) -> bool:
        """Whether a call runs that the scheduler has not been told of."""
        return any(use is not None for use in self._running.values())

    def report(self, began_before_s: float) -> LeaseUsed | None:
        """What ran since the last report, with the calls that began before then and still run."""
        for request, use in self._running.items():
            if use is not None and use.began_s <= began_before_s:
                self.uses.append(use)
                self._running[request] = None
        if not self.uses and not self.ends:
            return None
        kind, uses, ends = self.kind, tuple(self.uses), tuple(self.ends)
        self.uses.clear()
        self.ends.clear()
        return LeaseUsed(self.id, kind.function, uses, ends)


class OwnLease(NamedTuple):
    """A lease that the scheduler gave a question: this call's, or one that it took over."""

    granted: GrantedLease
    request: RequestId


Found = KeptLease | OwnLease
