"""The line in which the calls of one model wait for their turn, in the order of their arrival.

Whoever has the turn may answer others that wait, and gives the turn to the first of the rest. Where
calls that run as one stand behind others (the steps of texts behind the first steps of new ones),
those others get as much time as the last group took, and then the next group comes first. So nobody
in a group waits for all others, and the others lose half of the time at most.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

from gpu_manager.worker.calls.call import CallAnswer, ChannelCall


class CallInLine:
    """A call in line, and how it was answered by another one's turn.

    Calls of equal `likeness` can run as one; None is like no other.
    """

    __slots__ = ("asked", "asked_s", "likeness", "result", "stands_alone", "turn")

    def __init__(self, asked: ChannelCall) -> None:
        self.asked = asked
        self.asked_s = time.perf_counter()
        self.likeness: Hashable = None
        self.stands_alone = False  # whatever waits beside it
        self.result: CallAnswer | BaseException | None = None  # once it is done
        self.turn: threading.Event | None = None

    @property
    def is_done(self) -> bool:
        return self.result is not None

    def wake(self) -> None:
        if self.turn is not None:  # else it is the one that had the turn at once
            self.turn.set()

    def outcome(self) -> CallAnswer:
        assert self.result is not None, "it is asked for when the call is done"
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class CallLine:
    """Who has the turn, and who waits for it. Thread-safe."""

    def __init__(
        self,
        likeness: Callable[[ChannelCall], Hashable],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`likeness` is asked, on a call's own thread, only when calls wait."""
        self._likeness = likeness
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[CallInLine] = deque()
        self._taken: list[CallInLine] = []  # by the one that has the turn
        self._holder: CallInLine | None = None  # has the turn, since then
        self._since_s = 0.0
        self._grouped: Hashable = None  # what the calls of the last group have in common
        self._grouped_from_s = 0.0  # they come first from then on

    def stand(self, call: CallInLine) -> bool:
        """Wait for the turn: True when the call has it; False when others have answered it."""
        if self.enter(call):
            return True
        assert call.turn is not None, "it waits"
        call.turn.wait()
        return not call.is_done

    def enter(self, call: CallInLine) -> bool:
        """Whether a call has the turn at once; else it stands in line from now on."""
        if self._begins(call):
            return True
        if not call.stands_alone:
            call.likeness = self._likeness(call.asked)
        call.turn = threading.Event()
        return self._begins(call, waits=True)

    def __len__(self) -> int:
        """The calls in it, with the one that has the turn."""
        with self._lock:
            return len(self._waiting) + (self._holder is not None)

    def any_waiting(self) -> bool:
        return bool(self._waiting)

    def count_like(self, call: CallInLine) -> int:
        """How many of those that wait can run with this one, which has the turn."""
        if call.stands_alone:
            return 0
        if call.likeness is None:  # it found nobody in line
            call.likeness = self._likeness(call.asked)
        with self._lock:
            return sum(self._is_like(other, call) for other in self._waiting)

    def take_like(self, call: CallInLine, most: int) -> list[CallInLine]:
        """Take the first of these out of the line; each must be answered or put back."""
        with self._lock:
            group = [other for other in self._waiting if self._is_like(other, call)][:most]
            taken = set(map(id, group))
            self._waiting = deque(other for other in self._waiting if id(other) not in taken)
            self._taken = list(group)
        return group

    def put_back(self, calls: list[CallInLine]) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(calls))

    def note_group(self, call: CallInLine) -> None:
        """Calls like this one, which has the turn, run as one."""
        self._grouped = call.likeness

    def note_single(self, call: CallInLine) -> None:
        """Calls like this one, which has the turn, run as one no more."""
        if self._grouped == call.likeness:
            self._grouped = None

    def leave(self) -> None:
        """Give the turn to the call that is next; wake those that were answered meanwhile."""
        with self._lock:
            now_s = self._clock()
            if self._holder is not None and self._is_grouped(self._holder):
                self._grouped_from_s = now_s + (now_s - self._since_s)
            taken, self._taken = self._taken, []
            following = self._take_next(now_s)
            self._holder, self._since_s = following, now_s
        for call in taken:
            if call.is_done:
                call.wake()
        if following is not None:
            following.wake()

    def _begins(self, call: CallInLine, *, waits: bool = False) -> bool:
        """Take the turn if nobody has it; else the call waits behind the others if it is to."""
        with self._lock:
            if self._holder is None:
                self._holder, self._since_s = call, self._clock()
                return True
            if waits:
                self._waiting.append(call)
            return False

    def _take_next(self, now_s: float) -> CallInLine | None:
        """Take the call that is next out of the line: the first one, or the first of a group."""
        if self._grouped is not None and now_s > self._grouped_from_s:
            for call in self._waiting:
                if self._is_grouped(call):
                    self._waiting.remove(call)
                    return call
        return self._waiting.popleft() if self._waiting else None

    def _is_grouped(self, call: CallInLine) -> bool:
        return (
            not call.stands_alone and call.likeness is not None and call.likeness == self._grouped
        )

    @staticmethod
    def _is_like(one: CallInLine, other: CallInLine) -> bool:
        return not one.stands_alone and one.likeness is not None and one.likeness == other.likeness
