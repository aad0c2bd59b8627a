"""What can go wrong in the scheduler.

SchedulerError
├── UnknownPolicy        no policy of that name
├── BadParameter         a policy parameter that does not exist, or a value it cannot take
├── BadEvent             an event about something that this core was never told of
├── BadWorkload          a workload or trace that cannot be simulated
├── BadValue             a value from outside that is none of ours
├── BadToken             a lease token that was forged or came too late
├── BadRecording         a file that is no recording of a live run, or cannot be written
├── Refused              what was asked cannot be done, and changed nothing or only a part
├── StoreError           the datastore did not do what was asked
│   ├── StoreUnavailable it cannot be reached, or does not answer; whether it did it is unknown
│   ├── Fenced           a write of a leader that is one no more
│   └── LeaseGone        the datastore's lease has expired, with every key that was under it
├── ServiceError         the service, or its client, cannot do what it was asked
│   ├── BadRequest       what was sent makes no sense
│   ├── NotAllowed       no credentials, wrong ones, or too little power
│   ├── Unknown          nothing of that name
│   ├── NotLeading       another scheduler leads, or none
│   ├── NoGpus           no GPU is attached
│   └── Unreachable      no scheduler answered
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


class BadValue(SchedulerError):
    """A plain value stands for none of ours; `path` leads to the part that is wrong."""

    def __init__(self, detail: str, path: tuple[str, ...] = ()) -> None:
        self.detail = detail
        self.path = path
        super().__init__(f"{'.'.join(path)}: {detail}" if path else detail)


class BadToken(SchedulerError):
    """A lease token gives no right to anything (any more, where it is only `late`)."""

    def __init__(self, reason: str, *, late: bool = False) -> None:
        self.late = late
        super().__init__(reason)


class BadRecording(SchedulerError):
    """The recording is none, is of another version, or cannot be written; the text says why."""


class Refused(SchedulerError):
    """An event that somebody asked for could not be obeyed, or not everywhere."""

    def __init__(self, event: object, reason: str) -> None:
        self.event = event
        self.reason = reason
        super().__init__(reason)


class StoreError(SchedulerError):
    """The datastore did not do what was asked; the text says why."""


class StoreUnavailable(StoreError):
    """The datastore cannot be reached or does not answer; a write may have been done, or not."""


class Fenced(StoreError):
    """Nothing was written: the key of the fence is gone, or was made anew by somebody else."""

    def __init__(self, key: str, revision: int) -> None:
        self.key = key
        self.revision = revision
        super().__init__(f"{key!r} is no longer the one that was made at revision {revision}")


class LeaseGone(StoreError):
    """The datastore's lease has expired or was revoked, and its keys went with it."""

    def __init__(self, lease: int) -> None:
        self.lease = lease
        super().__init__(f"lease {lease:x} is gone")


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


class ServiceError(SchedulerError):
    """Something about how the service was asked, or that it could not be."""


class BadRequest(ServiceError):
    """What was sent is no request that this service knows; the text says why."""


class NotAllowed(ServiceError):
    """Who asks has shown no credentials (`known` is False), or may not do this."""

    def __init__(self, message: str, *, known: bool) -> None:
        self.known = known
        super().__init__(message)


class Unknown(ServiceError):
    """There is nothing of that name."""

    def __init__(self, what: str, name: str) -> None:
        self.what = what
        self.name = name
        super().__init__(f"no {what} {name!r}")


class NotLeading(ServiceError):
    """This scheduler does not decide; the one at `leader` does, where that is known."""

    def __init__(self, leader: str | None) -> None:
        self.leader = leader
        where = "none does yet" if leader is None else f"ask {leader}"
        super().__init__(f"this scheduler does not lead: {where}")


class NoGpus(ServiceError):
    """Nothing can be placed: no GPU manager with a GPU is attached."""

    def __init__(self) -> None:
        super().__init__("no GPU is attached to the scheduler")


class Unreachable(ServiceError):
    """No scheduler answered, for as long as the caller would wait."""
