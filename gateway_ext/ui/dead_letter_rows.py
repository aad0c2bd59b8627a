"""Dead letters as the page shows them, read again only when their number changes."""

from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.queue.job_queue import JobQueue
from gateway_ext.jobs.queue.job_values import DeadLetter, JobNumber
from gateway_ext.ui.page_state import Json

_SHOWN = 100


class DeadLetterRows:
    """The dead letters of one queue; `why` is the reason when the queue cannot be read."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._seen: tuple[int, int] | None = None
        self._shown: Json = {"count": 0, "items": [], "why": ""}

    async def look(self) -> Json:
        """The number of dead letters, and the first of them."""
        tally = self._queue.tally
        now = (tally.dead, tally.dead_bytes)
        if now == self._seen:
            return self._shown
        try:
            found = await self._queue.dead_letters(0, _SHOWN) if tally.dead else ()
        except QueueFailed as error:
            self._seen = None
            return {**self._shown, "count": tally.dead, "why": str(error)}
        self._seen = now
        items = [_letter(letter) for letter in found]
        self._shown = {"count": tally.dead, "items": items, "why": ""}
        return self._shown

    async def replay(self, letter: int) -> None:
        """Try the letter again."""
        self._seen = None
        await self._queue.replay(JobNumber(letter), self._queue.now_s())

    async def discard(self, letter: int) -> None:
        """Delete the letter."""
        self._seen = None
        await self._queue.discard(JobNumber(letter))


def _letter(letter: DeadLetter) -> Json:
    return {
        "id": letter.number,
        "call": letter.call.id,
        "function": str(letter.call.function),
        "at": letter.died_at_s,
        "tries": letter.attempts,
        "why": letter.why,
    }
