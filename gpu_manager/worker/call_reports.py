"""Reports of a worker about its calls: how they ran, and that one needs more memory."""

import threading
import time
from collections.abc import Callable

from gpu_manager.worker import orders
from gpu_manager.worker.calls.call import CallAnswer
from gpu_manager.worker.usage import ModelUsage

_INTERVAL_S = 0.02  # between two reports about calls of one lease
_PATIENCE_S = 10.0  # for an answer to pressure: the manager's own patience is shorter

Tell = Callable[[orders.WorkerOrder], None]


class CallSums:
    """Sums up calls, so that many short ones do not drown the manager."""

    def __init__(self, model: int, usage: ModelUsage, tell: Tell) -> None:
        self._model = model
        self._usage = usage
        self._tell = tell
        self._lock = threading.Lock()
        self._told_s = 0.0
        self._pending: orders.CallsRan | None = None

    def add(
        self,
        lease: int,
        session: str,
        answer: CallAnswer,
        peak_bytes: int,
        held_bytes: int,
        kept_bytes: int,
    ) -> None:
        """A call of this lease ended well; between calls the model keeps these bytes.

        The session is named if the lease is divided.
        """
        batch, together, run_s = answer.batch, answer.together, answer.times[2]
        with self._lock:
            before = self._pending
            if before is not None and not _is_like(before, lease, session, answer):
                self._send()
                before = None
            calls = 1 if before is None else before.calls + 1
            held_bytes = max(held_bytes, 0 if before is None else before.held_bytes)
            news = self._usage.news(peak_bytes, held_bytes or kept_bytes)
            metrics = news or ([] if before is None else before.metrics)
            mean_s = run_s if before is None else before.run_s + (run_s - before.run_s) / calls
            self._pending = orders.CallsRan(
                *(self._model, lease, calls, batch, mean_s, peak_bytes, held_bytes, together),
                metrics,
                session,
            )
            if time.monotonic() - self._told_s > _INTERVAL_S:
                self._send()

    def flush(self) -> None:
        with self._lock:
            self._send()

    def _send(self) -> None:
        if self._pending is not None:
            self._told_s = time.monotonic()
            self._tell(self._pending)
            self._pending = None


def _is_like(before: orders.CallsRan, lease: int, session: str, answer: CallAnswer) -> bool:
    found = before.lease, before.session, before.batch, before.together
    return found == (lease, session, answer.batch, answer.together)


class MemoryRequests:
    """Asks the manager for memory, one call at a time, and waits for its answer."""

    def __init__(self, model: int, tell: Tell) -> None:
        self._model = model
        self._tell = tell
        self._number = 0
        self._answered = threading.Condition()
        self._answers: dict[int, orders.SetLimit] = {}

    def ask(self, lease: int, need_bytes: int) -> tuple[int | None, bool]:
        """The limit from now on, and whether the call may go on; no answer is a no."""
        with self._answered:
            self._number += 1
            number = self._number
            self._answers.clear()
            self._tell(orders.Pressure(self._model, number, lease, need_bytes))
            self._answered.wait_for(lambda: number in self._answers, _PATIENCE_S)
            answer = self._answers.get(number)
        return (None, False) if answer is None else (answer.limit_bytes, answer.retry)

    def answer(self, order: orders.SetLimit) -> None:
        with self._answered:
            self._answers[order.answers] = order
            self._answered.notify_all()
