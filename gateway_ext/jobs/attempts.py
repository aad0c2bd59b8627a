"""How an attempt at a job ends, and whether there is another one, and when; pure."""

from dataclasses import dataclass, replace
from typing import ClassVar

from gateway_ext.jobs.body_buffer import BodyBuffer
from gateway_ext.jobs.values import CallResult, Job, JobLane

# Statuses that ask for another attempt; every other status is the result.
RETRIED = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class BackOff:
    """The wait before the next attempt, which doubles up to `most_s`."""

    first_s: float = 1.0
    most_s: float = 60.0
    # This share of each wait is random, so that attempts that failed together spread out.
    jitter: float = 0.5

    def wait_s(self, failures: int, chance: float, at_least_s: float = 0.0) -> float:
        """The wait after this many failures; `chance` is from 0 to 1.

        `at_least_s`, which the function or receiver asked for, is respected even beyond `most_s`.
        """
        steps = min(failures - 1, 64)  # a larger power would overflow
        whole_s = min(self.most_s, self.first_s * 2.0**steps)
        spread_s = whole_s * self.jitter
        if at_least_s > whole_s - spread_s:
            return at_least_s + spread_s * chance
        return whole_s - spread_s * (1.0 - chance)


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How an attempt ended."""

    status: int
    why: str
    broken: bool = False
    taken: bool = True  # not put off by gateway, scheduler or function, which have too many calls
    retry_after_s: float = 0.0
    estimated: bool = False  # by the gateway or the scheduler


@dataclass(frozen=True, slots=True)
class JobDone:
    """The job is complete; the queue removes it."""

    outcome: ClassVar[str] = "done"  # the label of this ending in the metrics


@dataclass(frozen=True, slots=True)
class TryAgain:
    """The job waits for this time; `counts` is False where the function was not called."""

    outcome: ClassVar[str] = "again"
    after_s: float
    why: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class CallAnswered:
    """The call has a result, which is to be posted to its callback in this lane."""

    outcome: ClassVar[str] = "answered"
    result: CallResult
    body: BodyBuffer
    lane: JobLane


@dataclass(frozen=True, slots=True)
class JobDead:
    """The job becomes a dead letter; `status` is the last answer's, 0 where there was none."""

    outcome: ClassVar[str] = "dead"
    why: str
    status: int = 0


JobEnding = JobDone | TryAgain | CallAnswered | JobDead


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and for how long, a job is tried."""

    attempts: int = 10
    # A call that the function did not take costs no attempt; it is given up at this age.
    most_age_s: float = 24 * 3600.0
    # The longest pause that a function may ask for.
    most_retry_after_s: float = 3600.0
    back_off: BackOff = BackOff()

    def of(self, attempts: int | None) -> "RetryPolicy":
        return self if attempts is None else replace(self, attempts=max(1, attempts))

    def verdict(
        self, tried: AttemptOutcome, job: Job, now_s: float, chance: float
    ) -> TryAgain | JobDead | None:
        """None where the answer is the result; dead at the limit on attempts, or on age.

        `job` is as it was before this attempt.
        """
        if not tried.broken and tried.status not in RETRIED:
            return None
        # An estimate may be far too high by then: calls before this one leave, a GPU returns.
        most_s = self.back_off.most_s if tried.estimated else self.most_retry_after_s
        asked_s = min(tried.retry_after_s, most_s)
        if not tried.taken:
            age_s = now_s - job.call.queued_at_s
            if age_s >= self.most_age_s:
                return JobDead(f"not taken for {age_s:.0f} s: {tried.why}")
            wait_s = self.back_off.wait_s(job.deferrals + 1, chance, asked_s)
            return TryAgain(wait_s, tried.why, counts=False)
        made = job.attempts + 1
        if made >= self.attempts:
            return JobDead(f"{made} attempts failed, the last one with: {tried.why}")
        return TryAgain(self.back_off.wait_s(made, chance, asked_s), tried.why)
