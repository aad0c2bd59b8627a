"""What can go wrong in the scheduler.

SchedulerError
├── UnknownPolicy        no policy of that name, or a file that is none
├── AmbiguousPolicy      two policies of one name are installed
├── BadParameter         a policy parameter that does not exist, or a value it cannot take
├── BadEvent             an event about a slot, GPU or lease that the core does not know
├── BadWorkload          a workload or trace that cannot be simulated
├── BadValue             a value from outside that does not decode
├── BadToken             a lease token that is forged or expired
├── BadRecording         a file that is no recording of a live run, or cannot be written
├── EventRefused         an event that could not be carried out, or not everywhere
├── DatastoreError       the datastore refused or failed an operation
│   ├── StoreUnavailable it is unreachable or does not answer; a write may have happened
│   ├── Fenced           a write of a scheduler that no longer leads
│   └── LeaseGone        the datastore's lease has expired, with every key that was under it
├── ServiceError         the service, or its client, cannot carry a call out
│   ├── MalformedRequest the body or query of a call is invalid
│   │   └── BodyTooLarge the body is larger than the scheduler reads
│   ├── CallerNotAllowed no credentials, wrong ones, or insufficient rights
│   ├── UnknownName      no object of that name
│   │   └── UnknownModel no model of that name, nor one of a function
│   ├── NotLeading       another scheduler leads, or none
│   ├── NoGpus           no GPU is attached
│   └── SchedulerUnreachable no scheduler answered
└── RequestEnded         a request ended while its caller waited for a GPU
    ├── QueueFull        too many requests wait already
    ├── OverQuota        its namespace or function has used up a quota
    ├── ModelsTooLarge   no GPU can hold its models
    ├── RequestExpired   its deadline passed
    ├── RequestWithdrawn its caller or the scheduler cancelled it
    ├── RequestFailed    its GPU work failed or its GPU was lost
    └── GivenBack        its last lease was released for good
"""

from scheduler.model.values import RequestId


class SchedulerError(Exception):
    """Base of every error that the scheduler raises."""


class UnknownPolicy(SchedulerError):
    """No policy has this name, or its file is none."""

    def __init__(self, name: str, known: tuple[str, ...], detail: str = "") -> None:
        super().__init__(
            f"policy {name!r}: {detail}"
            if detail
            else f"unknown policy {name!r}; known: {', '.join(known)}"
        )


class AmbiguousPolicy(SchedulerError):
    """Two installed policies have this name, so nobody could say which one decides."""

    def __init__(self, name: str, owners: tuple[str, str]) -> None:
        super().__init__(
            f"policy {name!r} is given twice, by {owners[0]} and by {owners[1]}: "
            "uninstall one of them, or have it take another name"
        )


class BadParameter(SchedulerError):
    """A policy has no such parameter, or the value is outside its range."""

    def __init__(self, policy: str, parameter: str, detail: str) -> None:
        super().__init__(f"policy {policy!r}, parameter {parameter!r}: {detail}")


class BadEvent(SchedulerError):
    """The driver reported something about a slot, GPU or lease that does not exist."""

    def __init__(self, what: str, identity: object) -> None:
        super().__init__(f"no {what} {identity!r}")


class BadWorkload(SchedulerError):
    """The workload or its trace file is wrong; the text says where and why."""


class BadValue(SchedulerError):
    """A plain value does not decode; `path` leads to the wrong part."""

    def __init__(self, detail: str, path: tuple[str, ...] = ()) -> None:
        self.detail = detail
        self.path = path
        super().__init__(f"{'.'.join(path)}: {detail}" if path else detail)


class BadToken(SchedulerError):
    """A lease token gives no right: never, or (if `late`) no longer."""

    def __init__(self, reason: str, *, late: bool = False) -> None:
        self.late = late
        super().__init__(reason)


class BadRecording(SchedulerError):
    """The file is no recording, of another version, or cannot be written; the text says why."""


class EventRefused(SchedulerError):
    """An event could not be carried out, or not everywhere."""

    def __init__(self, event: object, reason: str) -> None:
        self.event = event
        self.reason = reason
        super().__init__(reason)


class DatastoreError(SchedulerError):
    """The datastore did not do what was asked; the text says why."""


class StoreUnavailable(DatastoreError):
    """The datastore is unreachable or does not answer; a write may or may not have been done."""


class Fenced(DatastoreError):
    """Nothing was written: the key of the fence is gone, or another process made it again."""

    def __init__(self, key: str, revision: int) -> None:
        super().__init__(f"{key!r} is no longer the one that was made at revision {revision}")


class LeaseGone(DatastoreError):
    """The datastore's lease has expired or was revoked, and its keys went with it."""

    def __init__(self, lease: int) -> None:
        super().__init__(f"lease {lease:x} is gone")


class RequestEnded(SchedulerError):
    """A request ended while its caller waited for a GPU."""

    def __init__(self, request: RequestId, reason: str) -> None:
        self.request = request
        self.reason = reason
        super().__init__(f"request {request}: {reason}")


class QueueFull(RequestEnded):
    """The queue is full: requests that wait now need `wait_s`, or an unknown time if that is 0."""

    def __init__(self, request: RequestId, reason: str, waiting: int, wait_s: float = 0.0) -> None:
        self.waiting = waiting
        self.wait_s = wait_s
        super().__init__(request, reason)


class OverQuota(RequestEnded):
    """A quota of its namespace or function is used up; the reason names the owner and the quota.

    The quota may have room in `wait_s`, or at an unknown time if that is 0.
    """

    def __init__(self, request: RequestId, reason: str, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        super().__init__(request, reason)


class ModelsTooLarge(RequestEnded):
    """The models of the request need more memory than the largest GPU has."""

    def __init__(
        self, request: RequestId, reason: str, needed_bytes: int, largest_bytes: int
    ) -> None:
        self.needed_bytes = needed_bytes
        self.largest_bytes = largest_bytes
        super().__init__(request, reason)


class RequestExpired(RequestEnded):
    """The caller's deadline has passed."""

    def __init__(self, request: RequestId, reason: str, deadline_s: float | None) -> None:
        self.deadline_s = deadline_s
        super().__init__(request, reason)


class RequestWithdrawn(RequestEnded):
    """The request was cancelled, or the scheduler stops."""


class RequestFailed(RequestEnded):
    """The GPU work of the request failed, or its GPU was lost."""


class GivenBack(RequestEnded):
    """The request's last lease was released for good while it waited for another one."""


class ServiceError(SchedulerError):
    """A call to the service is invalid, or failed."""


class MalformedRequest(ServiceError):
    """The call is invalid; the text says why."""


class BodyTooLarge(MalformedRequest):
    """The call's body is larger than the scheduler reads."""


class CallerNotAllowed(ServiceError):
    """The caller has no valid credentials (`known` is False), or lacks the right."""

    def __init__(self, message: str, *, known: bool) -> None:
        self.known = known
        super().__init__(message)


class UnknownName(ServiceError):
    """There is no object of that name."""

    def __init__(self, what: str, name: str, detail: str = "") -> None:
        super().__init__(f"no {what} {name!r}{detail}")


class UnknownModel(UnknownName):
    """No model has this id, nor has a function of this name one."""

    def __init__(self, name: str) -> None:
        detail = ": a function has none if it uses no GPU, or was not called yet"
        super().__init__("model", name, detail)


class NotLeading(ServiceError):
    """This scheduler does not lead; the one at `leader` does, if that is known."""

    def __init__(self, leader: str | None) -> None:
        self.leader = leader
        where = "none does yet" if leader is None else f"ask {leader}"
        super().__init__(f"this scheduler does not lead: {where}")


class NoGpus(ServiceError):
    """Nothing can be placed: no GPU manager with a GPU is attached."""

    def __init__(self) -> None:
        super().__init__("no GPU is attached to the scheduler")


class SchedulerUnreachable(ServiceError):
    """No scheduler answered within the caller's patience."""
