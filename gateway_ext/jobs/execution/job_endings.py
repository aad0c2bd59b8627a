"""How an attempt at a claimed job ended, for the queue to record."""

from dataclasses import dataclass
from typing import ClassVar

from gateway_ext.jobs.queue.job_queue import BodySpool
from gateway_ext.jobs.queue.job_values import CallResult, JobLane


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
    body: BodySpool
    lane: JobLane


@dataclass(frozen=True, slots=True)
class JobDead:
    """The job becomes a dead letter; `status` is the last answer's, 0 where there was none."""

    outcome: ClassVar[str] = "dead"
    why: str
    status: int = 0


JobEnding = JobDone | TryAgain | CallAnswered | JobDead
