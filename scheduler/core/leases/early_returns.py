"""Requests that gave a lease back early: those that pause, and those that asked for another one."""

from collections.abc import Iterator

from scheduler.core.state.pending import Pending, Standing
from scheduler.model.values import LeaseId, RequestId


class EarlyReturns:
    """By lease: the requests that have none now, and those that have or want another one."""

    def __init__(self) -> None:
        self._paused: dict[LeaseId, list[Pending]] = {}
        self._returned: dict[LeaseId, list[Pending]] = {}

    def pause(self, pending: Pending) -> None:
        """It has given its lease back, and may want another one."""
        assert pending.lease is not None
        pending.standing = Standing.PAUSED
        self._paused.setdefault(pending.lease, []).append(pending)

    def unpause(self, pending: Pending) -> None:
        """It wants another lease, or has ended."""
        assert pending.lease is not None
        _drop(self._paused, pending.lease, pending)

    def returns(self, pending: Pending) -> None:
        """It wants another lease than the one that it gave back."""
        assert pending.lease is not None
        pending.gave_back.append(pending.lease)
        self._returned.setdefault(pending.lease, []).append(pending)

    def ended(self, pending: Pending) -> None:
        """It has ended."""
        for lease in pending.gave_back:
            _drop(self._returned, lease, pending)

    def any_of(self, lease: LeaseId) -> bool:
        """Whether some request gave this lease back early, and has not ended."""
        return lease in self._paused or lease in self._returned

    def of(self, lease: LeaseId, request: RequestId | None) -> Iterator[Pending]:
        """Those that gave this lease back early: the named one, or all of them."""
        found = [*self._paused.get(lease, ()), *self._returned.get(lease, ())]
        return (pending for pending in found if request is None or pending.id == request)


def _drop(table: dict[LeaseId, list[Pending]], lease: LeaseId, pending: Pending) -> None:
    others = table.get(lease, [])
    if pending in others:
        others.remove(pending)
        if not others:
            del table[lease]
