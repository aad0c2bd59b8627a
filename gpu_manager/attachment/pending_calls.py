"""Calls of a GPU manager to its scheduler that are not answered yet."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

from scheduler.api import Placement, RequestId
from scheduler.wire.node_stream import Acquire, Answer, Ask, Survey, Wanted
from scheduler.wire.refusals import error_of

Call = Acquire | Wanted | Ask | Survey


class PendingCall:
    """One call and its waiter; `made` makes the call again for a scheduler that lost it."""

    def __init__(self, made: Callable[[int], Call], number: int, request: RequestId | None) -> None:
        self.made = made
        self.number = number
        self.request = request
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class PendingCalls:
    """Every call from its first asking to its answer, over as many streams as that takes."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._waiting: dict[int, PendingCall] = {}
        self._by_request: dict[RequestId, list[PendingCall]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Call]:
        """The calls that are not answered, as they would be made now."""
        return iter([found.made(found.number) for found in self._waiting.values()])

    def add(self, made: Callable[[int], Call], request: RequestId | None = None) -> PendingCall:
        """One more call."""
        found = PendingCall(made, next(self._numbers), request)
        self._waiting[found.number] = found
        if request is not None:
            self._by_request.setdefault(request, []).append(found)
        return found

    def answered(self, answer: Answer) -> None:
        """The result of a call; ignored if its waiter was cancelled."""
        found = self._waiting.pop(answer.call, None)
        if found is None or found.answer.done():
            return
        if answer.refusal is None:
            found.answer.set_result(answer)
        else:
            found.answer.set_exception(error_of(answer.refusal))

    def granted(self, request: RequestId, placement: Placement) -> None:
        """A lease of this request is in force on this node: that is the answer.

        It comes before the scheduler's own, which may be lost with the scheduler.
        """
        for found in self._by_request.get(request, ()):
            self.answered(Answer(found.number, placement))

    def leave(self, found: PendingCall, *, given_up: bool) -> bool:
        """The waiter of this call is gone; whether its request is to be cancelled now."""
        self._waiting.pop(found.number, None)
        if found.request is None:
            return False
        together = self._by_request[found.request]
        together.remove(found)
        if not together:
            del self._by_request[found.request]
        return given_up and not together
