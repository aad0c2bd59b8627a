"""Who waits for a GPU: the tasks that asked, by request."""

from asyncio import Future, get_running_loop

from scheduler.api import Answer, Ended
from scheduler.errors import Refused
from scheduler.model import RequestId

Waiter = Future[Answer]


class Callers:
    """Answers every task that waits for a request, once; several may wait for the same one."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, list[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, request: RequestId) -> "Call":
        """One more task waits for this request."""
        waiter: Waiter = get_running_loop().create_future()
        together = self._waiting.setdefault(request, [])
        together.append(waiter)
        return Call(waiter, together)

    def answer(self, answer: Answer) -> None:
        """Tell all who wait for the request; whoever asks later waits for the next answer."""
        for waiter in self._waiting.pop(answer.request, ()):
            if not waiter.done():
                waiter.set_result(answer)

    def leave(self, request: RequestId, call: "Call") -> bool:
        """A task waits no longer; whether nobody else waits for, or was given, what it asked."""
        call.together.remove(call.waiter)
        if call.together or call.ended:
            return False
        if self._waiting.get(request) is call.together:
            del self._waiting[request]
        return True

    def requests(self) -> list[RequestId]:
        """Every request that some task waits for."""
        return list(self._waiting)


class Call:
    """One task's wait, and the waits of all that joined for the same answer."""

    __slots__ = ("together", "waiter")

    def __init__(self, waiter: Waiter, together: list[Waiter]) -> None:
        self.waiter = waiter
        self.together = together

    def handled(self, refused: Refused | None) -> None:
        """Tell this task alone where what it asked makes no sense."""
        if refused is not None and not self.waiter.done():
            self.waiter.set_exception(refused)

    @property
    def ended(self) -> bool:
        """Whether the request was over before the task heard of it."""
        waiter = self.waiter
        answered = waiter.done() and not waiter.cancelled() and waiter.exception() is None
        return answered and isinstance(waiter.result(), Ended)
