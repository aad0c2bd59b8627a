"""What is to become of a claimed job."""

from dataclasses import dataclass

from gateway_ext.jobs.model import Lane, Result
from gateway_ext.jobs.queue import Spool


@dataclass(frozen=True, slots=True)
class Done:
    """Forget it."""


@dataclass(frozen=True, slots=True)
class Again:
    """Let it wait for this time; `counts` says whether it was an attempt."""

    after_s: float
    why: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Answered:
    """Call back with this, in this lane."""

    result: Result
    body: Spool
    lane: Lane


@dataclass(frozen=True, slots=True)
class Dead:
    """Make a dead letter of it; `status` is what was answered last, 0 where nothing was."""

    why: str
    status: int = 0


Ending = Done | Again | Answered | Dead
