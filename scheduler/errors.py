"""What can go wrong in the scheduler.

SchedulerError
├── UnknownPolicy        no policy of that name
├── BadParameter         a policy parameter that does not exist, or a value it cannot take
├── BadEvent             an event about something that this core was never told of
├── BadWorkload          a workload or trace that cannot be simulated
├── Refused              what was asked cannot be done, and changed nothing or only a part
└── RequestEnded         a request ended, and its caller waits for a GPU in vain
    ├── QueueFull        too many requests wait already
    ├── TooLarge         no GPU can hold its models
    ├── Expired          its deadline passed
    ├── Cancelled        somebody cancelled it
    ├── Failed           its GPU work failed or its GPU was lost
    └── GivenBack        its last lease was released for good
"""

from scheduler.model import RequestId


class SchedulerError(Exception):
    """Base of every error that the scheduler raises."""


class UnknownPolicy(SchedulerError):
    """No policy answers to this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        self.name = name
        self.known = known
        super().__init__(f"unknown policy {name!r}; known: {', '.join(known)}")


class BadParameter(SchedulerError):
    """A policy has no such parameter, or the value is outside its range."""

    def __init__(self, policy: str, parameter: str, detail: str) -> None:
        self.policy = policy
        self.parameter = parameter
        super().__init__(f"policy {policy!r}, parameter {parameter!r}: {detail}")


class BadEvent(SchedulerError):
    """The driver reported something about a slot, GPU or lease that does not exist."""

    def __init__(self, what: str, identity: object) -> None:
        self.what = what
        self.identity = identity
        super().__init__(f"no {what} {identity!r}")


class BadWorkload(SchedulerError):
    """The workload or its trace file is wrong; the text says where and why."""


class Refused(SchedulerError):
    """An event that somebody asked for could not be obeyed, or not everywhere."""

    def __init__(self, event: object, reason: str) -> None:
        self.event = event
        self.reason = reason
        super().__init__(reason)


class RequestEnded(SchedulerError):
    """A request came to its end while somebody waited for it to be given a GPU."""

    def __init__(self, request: RequestId, reason: str) -> None:
        self.request = request
        self.reason = reason
        super().__init__(f"request {request}: {reason}")


class QueueFull(RequestEnded):
    """So many requests wait already that no further one is accepted."""

    def __init__(self, request: RequestId, reason: str, waiting: int) -> None:
        self.waiting = waiting
        super().__init__(request, reason)


class TooLarge(RequestEnded):
    """The models of the request need more memory than the largest GPU has."""

    def __init__(
        self, request: RequestId, reason: str, needed_bytes: int, largest_bytes: int
    ) -> None:
        self.needed_bytes = needed_bytes
        self.largest_bytes = largest_bytes
        super().__init__(request, reason)


class Expired(RequestEnded):
    """The time until which the caller would wait is over."""

    def __init__(self, request: RequestId, reason: str, deadline_s: float | None) -> None:
        self.deadline_s = deadline_s
        super().__init__(request, reason)


class Cancelled(RequestEnded):
    """Somebody cancelled the request, or the scheduler stops."""


class Failed(RequestEnded):
    """The GPU work of the request failed, or its GPU was lost."""


class GivenBack(RequestEnded):
    """The request's last lease was released for good while it waited for another one."""
