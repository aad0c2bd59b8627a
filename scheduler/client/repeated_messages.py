"""What one leader was told, and is told to the next one, which may not have heard of it."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import NamedTuple

from scheduler.model.values import RequestId
from scheduler.wire.caller_stream import Cancel, GiveBack

# A leader may die while a release that it took still waits for its node's stream, this long; and
# what was sent on a line that broke may never have arrived.
_REPEATED_S = 12.0
_MOST = 4_000


class _Said(NamedTuple):
    at_s: float
    message: GiveBack


class RepeatedMessages:
    """Leases that were given back and requests that were cancelled, the last ones of each."""

    def __init__(self) -> None:
        self._given_back: deque[_Said] = deque(maxlen=_MOST)
        self._cancelled: OrderedDict[RequestId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._given_back) + len(self._cancelled)

    def __iter__(self) -> Iterator[GiveBack | Cancel]:
        """What to repeat: first the leases."""
        yield from [said.message for said in self._given_back]
        yield from [Cancel(request) for request in self._cancelled]

    def gave_back(self, message: GiveBack, now_s: float) -> None:
        """A lease was given back."""
        self._given_back.append(_Said(now_s, message))

    def cancelled(self, request: RequestId, now_s: float) -> None:
        """A request was cancelled."""
        self._cancelled[request] = now_s
        self._cancelled.move_to_end(request)
        if len(self._cancelled) > _MOST:
            self._cancelled.popitem(last=False)

    def asked(self, request: RequestId) -> None:
        """A request is asked: a call that is tried again keeps its id."""
        self._cancelled.pop(request, None)

    def forget(self, heard_s: float) -> None:
        """What was said so long before this time, when a leader listened, is not repeated."""
        since_s = heard_s - _REPEATED_S
        while self._given_back and self._given_back[0].at_s < since_s:
            self._given_back.popleft()
        while self._cancelled and next(iter(self._cancelled.values())) < since_s:
            self._cancelled.popitem(last=False)
