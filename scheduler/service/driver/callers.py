"""The tasks that wait for a GPU, by request."""

from asyncio import Future, get_running_loop

from scheduler.api import AcquireAnswer, AcquireEnded
from scheduler.model.errors import EventRefused
from scheduler.model.values import RequestId

Waiter = Future[AcquireAnswer]


class WaitingCallers:
    """Answers every task that waits for a request, once; several may wait for the same one."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, list[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, request: RequestId) -> "CallerWait":
        """One more task waits for this request."""
        waiter: Waiter = get_running_loop().create_future()
        together = self._waiting.setdefault(request, [])
        together.append(waiter)
        return CallerWait(waiter, together)

    def answer(self, answer: AcquireAnswer) -> None:
        """Answer all tasks that wait for the request; a later task waits for the next answer."""
        for waiter in self._waiting.pop(answer.request, ()):
            if not waiter.done():
                waiter.set_result(answer)

    def leave(self, request: RequestId, call: "CallerWait") -> bool:
        """Remove a waiting task; whether its request is left without a waiting or answered task."""
        call.together.remove(call.waiter)
        if call.together or call.ended:
            return False
        if self._waiting.get(request) is call.together:
            del self._waiting[request]
        return True

    def requests(self) -> list[RequestId]:
        """Every request that some task waits for."""
        return list(self._waiting)


class CallerWait:
    """One task's wait, and the waits of all that joined for the same answer."""

    __slots__ = ("together", "waiter")

    def __init__(self, waiter: Waiter, together: list[Waiter]) -> None:
        self.waiter = waiter
        self.together = together

    def handled(self, refused: EventRefused | None) -> None:
        """Raise a refusal in this task alone."""
        if refused is not None and not self.waiter.done():
            self.waiter.set_exception(refused)

    @property
    def ended(self) -> bool:
        """Whether the request had ended before the task was resumed."""
        waiter = self.waiter
        answered = waiter.done() and not waiter.cancelled() and waiter.exception() is None
        return answered and isinstance(waiter.result(), AcquireEnded)
