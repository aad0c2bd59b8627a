"""How long calls of a function wait for their turn, and so how long one more would wait; pure.

Calls wait in three places: here, for an instance with a free place; in the instance, for a thread;
and at the scheduler, for a GPU. Nothing is expected until calls have waited: a function that has
just started, or that nobody has kept busy yet, refuses no call for its wait.
"""

from gateway_ext.tracing.reported_trace import thread_wait

_WEIGHT = 0.25
# A refusal by the scheduler holds for calls after it for this long at most.
_MOST_CLOSED_S = 1.0


class WaitPace:
    """The seconds by which each waiting call delays those behind it, as past waits show."""

    __slots__ = ("each_s",)

    def __init__(self) -> None:
        self.each_s: float | None = None

    def saw(self, ahead: int, waited_s: float, at_a_time: int) -> None:
        """Take in the wait of a call that came behind so many waiting ones.

        Of calls that are served so many at a time, as many waiting ones may begin together: after a
        slow start of all of them the first one has waited no less than the last one.
        """
        each_s = waited_s / max(ahead + 1, at_a_time)
        known_s = self.each_s
        self.each_s = each_s if known_s is None else known_s + _WEIGHT * (each_s - known_s)

    def wait_s(self, ahead: int) -> float:
        """The expected wait behind so many waiting calls; 0 while nothing is known."""
        return 0.0 if self.each_s is None else ahead * self.each_s


class CallWaits:
    """The waits of one function's calls; `known` once some call has waited.

    `at_a_time` is how many calls an instance serves at a time, as it reports: only reports of calls
    beside so many others say anything about waits.
    """

    __slots__ = ("known", "at_a_time", "_turns", "_threads", "_closed_until_s", "_gpu_wait_s")

    def __init__(self) -> None:
        self.known = False
        self.at_a_time = 0
        self._turns = WaitPace()
        self._threads = WaitPace()
        self._closed_until_s = self._gpu_wait_s = 0.0

    def saw_turn(self, ahead: int, waited_s: float, instances: int, places: int = 1) -> None:
        """A call has waited for one of the places of the instances, behind so many others."""
        self.known = True
        self._turns.saw(ahead, waited_s * instances, places)

    def saw_report(self, ahead: int, trace_report: bytes, answered_in_s: float = 0.0) -> None:
        """An instance reports a call that it was sent beside so many others.

        `answered_in_s` is the time from the whole request to the answer, if nobody else could make
        it longer: a busy process also reads late, which its own report does not show. The report is
        the function's own: a wrong one delays or refuses only that function's calls.
        """
        found = thread_wait(trace_report)
        if found is None:
            return
        self.at_a_time = found.at_a_time
        if ahead >= found.at_a_time:
            self.known = True
            waited_s = max(found.waited_s, answered_in_s - found.took_s)
            self._threads.saw(ahead - found.at_a_time, waited_s, found.at_a_time)

    def saw_full_gpus(self, wait_s: float, most_s: float, now_s: float) -> None:
        """The scheduler refused a call, since its wait of `wait_s` would exceed `most_s`.

        Until enough of the wait is over, further calls need not ask the scheduler.
        """
        if wait_s > most_s:
            self.known = True
            self._gpu_wait_s = wait_s
            self._closed_until_s = now_s + min(wait_s - most_s, _MOST_CLOSED_S)

    def expected_s(self, waiting: int, unanswered: int, instances: int, now_s: float) -> float:
        """The wait of a call that arrives now; `waiting` have no instance, `unanswered` have one.

        While no call has waited for an instance, those that wait delay others as in an instance.
        """
        at_gpus_s = self._gpu_wait_s if now_s < self._closed_until_s else 0.0
        turns = self._threads if self._turns.each_s is None else self._turns
        for_turn_s = turns.wait_s(waiting) / instances
        for_thread_s = self._threads.wait_s(max(0, unanswered // instances - self.at_a_time))
        return at_gpus_s + for_turn_s + for_thread_s
