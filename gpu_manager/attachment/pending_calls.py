"""Unanswered calls of a GPU manager to its scheduler."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

from scheduler.api import Placement, RequestId
from scheduler.wire.node_stream import Acquire, Answer, Ask, Locate, Survey, Wanted
from scheduler.wire.refusals import error_of

Call = Acquire | Wanted | Ask | Survey | Locate


class PendingCall:
    """One call and its future; `make_call` creates the message, for a stream at some time."""

    def __init__(
        self, make_call: Callable[[int, float], Call], number: int, request: RequestId | None
    ) -> None:
        self.make_call = make_call
        self.number = number
        self.request = request
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class PendingCalls:
    """Every call from its first message to its answer, over successive streams."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._waiting: dict[int, PendingCall] = {}
        self._by_request: dict[RequestId, list[PendingCall]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Call]:
        """Iterate over the unanswered calls, with times relative to now.

        Now is one time for all: a hold-up between two calls would change their order.
        """
        now_s = asyncio.get_running_loop().time()
        return iter([found.make_call(found.number, now_s) for found in self._waiting.values()])

    def add(
        self, make_call: Callable[[int, float], Call], request: RequestId | None = None
    ) -> PendingCall:
        """Add a call, and return it with its number."""
        found = PendingCall(make_call, next(self._numbers), request)
        self._waiting[found.number] = found
        if request is not None:
            self._by_request.setdefault(request, []).append(found)
        return found

    def set_answer(self, answer: Answer) -> None:
        """Complete a call with its answer, unless the call was cancelled."""
        found = self._waiting.pop(answer.call, None)
        if found is None or found.answer.done():
            return
        if answer.refusal is None:
            found.answer.set_result(answer)
        else:
            found.answer.set_exception(error_of(answer.refusal))

    def set_placement(self, request: RequestId, placement: Placement) -> None:
        """Complete the calls of a request that was granted a lease on this node.

        The scheduler's own answer comes later, and may be lost with the scheduler.
        """
        for found in self._by_request.get(request, ()):
            self.set_answer(Answer(found.number, placement))

    def remove(self, found: PendingCall, *, given_up: bool) -> bool:
        """Remove a call; return whether its request must be cancelled now."""
        self._waiting.pop(found.number, None)
        if found.request is None:
            return False
        same_request = self._by_request[found.request]
        same_request.remove(found)
        if not same_request:
            del self._by_request[found.request]
        return given_up and not same_request
