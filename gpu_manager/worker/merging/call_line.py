"""The line in which the calls of one model wait for their turn, in the order of their arrival.

Whoever has the turn may answer others that wait, and gives the turn to the first of the rest.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

from gpu_manager.worker.calls.channel_call import CallAnswer, ChannelCall


class CallInLine:
    """A call in line, and how it was answered by another one's turn.

    Calls of equal `likeness` can run as one; None is like no other.
    """

    __slots__ = (
        "answer",
        "asked",
        "asked_s",
        "error",
        "is_done",
        "likeness",
        "stands_alone",
        "turn",
    )

    def __init__(self, asked: ChannelCall) -> None:
        self.asked = asked
        self.asked_s = time.perf_counter()
        self.likeness: Hashable = None
        self.stands_alone = False  # whatever waits beside it
        self.answer: CallAnswer | None = None
        self.error: BaseException | None = None
        self.is_done = False
        self.turn: threading.Event | None = None

    def answered(self, answer: CallAnswer) -> None:
        """This is its answer, and has been delivered."""
        self.answer, self.is_done = answer, True

    def failed(self, error: BaseException) -> None:
        """It is answered by this error."""
        self.error, self.is_done = error, True

    def wake(self) -> None:
        """It is done, or has the turn."""
        if self.turn is not None:  # else it is the one that had the turn at once
            self.turn.set()

    def outcome(self) -> CallAnswer:
        """The answer, or its error is raised."""
        if self.error is not None:
            raise self.error
        assert self.answer is not None, "it is asked for when the call is done"
        return self.answer


class CallLine:
    """Who has the turn, and who waits for it. Thread-safe."""

    def __init__(self, likeness: Callable[[ChannelCall], Hashable]) -> None:
        """`likeness` is asked, on a call's own thread, only when calls wait."""
        self._likeness = likeness
        self._lock = threading.Lock()
        self._waiting: deque[CallInLine] = deque()
        self._taken: list[CallInLine] = []  # by the one that has the turn
        self._is_taken = False

    def stand(self, call: CallInLine) -> bool:
        """Wait for the turn: True when the call has it; False when others have answered it."""
        if self._begins():
            return True
        if not call.stands_alone:
            call.likeness = self._likeness(call.asked)
        call.turn = threading.Event()
        if self._begins(call):
            return True
        call.turn.wait()
        return not call.is_done

    def __len__(self) -> int:
        """The calls in it, with the one that has the turn."""
        with self._lock:
            return len(self._waiting) + self._is_taken

    def any_waiting(self) -> bool:
        """Whether some call waits."""
        return bool(self._waiting)

    def count_like(self, call: CallInLine) -> int:
        """How many of those that wait can run with this one, which has the turn."""
        if call.stands_alone:
            return 0
        if call.likeness is None:  # it found nobody in line
            call.likeness = self._likeness(call.asked)
        with self._lock:
            return sum(self._is_like(each, call) for each in self._waiting)

    def take_like(self, call: CallInLine, most: int) -> list[CallInLine]:
        """Take the first of these out of the line; each must be answered or put back."""
        with self._lock:
            found = [each for each in self._waiting if self._is_like(each, call)][:most]
            taken = set(map(id, found))
            self._waiting = deque(each for each in self._waiting if id(each) not in taken)
            self._taken = list(found)
        return found

    def put_back(self, calls: list[CallInLine]) -> None:
        """Have them be next, each alone."""
        for call in calls:
            call.stands_alone = True
        with self._lock:
            self._waiting.extendleft(reversed(calls))

    def leave(self) -> None:
        """Give the turn to the first call that waits; wake those that were answered meanwhile."""
        with self._lock:
            taken, self._taken = self._taken, []
            self._is_taken = bool(self._waiting)
            following = self._waiting.popleft() if self._waiting else None
        for call in taken:
            if call.is_done:
                call.wake()
        if following is not None:
            following.wake()

    def _begins(self, behind: CallInLine | None = None) -> bool:
        """Take the turn if nobody has it; else put a call behind those that wait."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return True
            if behind is not None:
                self._waiting.append(behind)
            return False

    @staticmethod
    def _is_like(one: CallInLine, other: CallInLine) -> bool:
        return not one.stands_alone and one.likeness is not None and one.likeness == other.likeness
