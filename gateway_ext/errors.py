"""Everything that the gateway raises.

GatewayError
├── BadRequest            the request is invalid
│   ├── BadDeployment     a deployment that is invalid
│   └── WrongMethod       the path does not support that method
├── NotAllowed            missing or wrong credentials
├── CrossSite             a browser's request from another site's page
├── WrongHost             a request in the name of a host for which the gateway does not answer
├── Unknown
│   ├── UnknownFunction
│   ├── UnknownSecret
│   ├── UnknownNamespace
│   └── UnknownJob
├── Conflict
│   ├── SecretExists
│   ├── SecretInUse
│   ├── NamespaceExists
│   └── JobExists
├── Unsupported           this provider has no such operation
├── TooLarge              a body, or other data, beyond a limit
├── TooSlow               a body that did not arrive in time
├── Busy                  a function takes no more calls now: try again after `retry_after_s`
├── NoInstance            no instance of the function became ready
├── Unreachable           an instance broke off; `sent`: bytes of the call may have reached it
├── TimedOut              the function exceeded its time limit
├── CallerGone            the caller disconnected
├── OwnStatus             `status` is the caller's HTTP status
│   └── NoGpu             the scheduler gave no lease
├── ProviderFailed        the provider's operation failed
└── QueueFailed           the job queue failed
    ├── QueueAway         it cannot be reached: try again after `retry_after_s`
    ├── QueueDiskFull     its disk has no room
    ├── BodyLost          the stored body of a job is gone
    └── ClaimLost         the claim on a job has ended

Features have errors of their own below these.
"""

import errno
import re
import sqlite3

from common.foreign_text import plain
from gateway_ext.model import FunctionId

# All that everybody may know of an end: what follows may be anybody's text, with sizes and paths.
_TOLD_END = re.compile(r"was ended by SIG[A-Z0-9]+|exited with status [0-9]+|was killed")


class GatewayError(Exception):
    """Base of all errors; the text is for the caller."""

    @property
    def logged(self) -> str:
        """The text for the gateway's log and traces."""
        return str(self)


class BadRequest(GatewayError):
    """The request is invalid."""


class BadDeployment(BadRequest):
    """The deployment is invalid."""


class WrongMethod(BadRequest):
    """The path does not support that method."""

    def __init__(self, method: str) -> None:
        super().__init__(f"{method} is not allowed here")


class NotAllowed(GatewayError):
    """Missing or wrong credentials."""

    def __init__(self) -> None:
        super().__init__("invalid credentials")


class CrossSite(GatewayError):
    """A browser sent the request from another site's page, with stored credentials."""


class WrongHost(GatewayError):
    """The gateway does not answer in the name of this host."""

    def __init__(self, host: bytes) -> None:
        shown = ascii(host[:100].decode("latin-1"))
        super().__init__(
            f"the gateway does not answer for the host {shown}: if it is to, name it in"
            " allowed_hosts of [gateway]"
        )


class Unknown(GatewayError):
    """No object has that name, which the text shows without control characters."""

    def __init__(self, text: str) -> None:
        super().__init__(plain(text))


class UnknownFunction(Unknown):
    """No such function."""

    def __init__(self, function: FunctionId) -> None:
        super().__init__(f"function {function.name} is not deployed in {function.namespace}")
        self.function = function


class UnknownSecret(Unknown):
    """No such secret."""

    def __init__(self, namespace: str, name: str) -> None:
        super().__init__(f"secret {name} is not in {namespace}")


class UnknownNamespace(Unknown):
    """No such namespace."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no namespace {name}")


class UnknownJob(Unknown):
    """No such dead letter."""

    def __init__(self, number: int | str) -> None:
        super().__init__(f"there is no dead letter {number}")


class Conflict(GatewayError):
    """The object exists already, or another object needs it."""


class SecretExists(Conflict):
    """A secret of that name exists already."""

    def __init__(self, namespace: str, name: str) -> None:
        super().__init__(f"secret {name} is in {namespace} already")


class SecretInUse(Conflict):
    """A function has the secret mounted."""

    def __init__(self, name: str, function: FunctionId) -> None:
        super().__init__(f"secret {name} is used by {function}")


class NamespaceExists(Conflict):
    """A namespace of that name exists already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a namespace {name} already")


class JobExists(Conflict):
    """A job with this call id waits already."""

    def __init__(self, function: FunctionId, call_id: str) -> None:
        super().__init__(f"a job of {function} with the call id {call_id} waits already")


class Unsupported(GatewayError):
    """This provider has no such operation."""


class TooLarge(GatewayError):
    """A body, or other data, beyond a limit."""

    def __init__(self, limit: int, what: str = "the body is", unit: str = "bytes") -> None:
        super().__init__(f"{what} larger than {limit} {unit}")


class TooSlow(GatewayError):
    """The body did not arrive in time."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"the body did not come within {after_s:g} s")


class Busy(GatewayError):
    """A function takes no more calls now: its queue is full, or the wait would be too long."""

    def __init__(
        self, function: FunctionId, retry_after_s: float, why: str = "has as many calls as it takes"
    ) -> None:
        super().__init__(f"{function} {why}")
        self.retry_after_s = retry_after_s


class NoInstance(GatewayError):
    """No instance of the function became ready."""

    def __init__(self, function: FunctionId, why: str) -> None:
        super().__init__(f"no instance of {function} is ready: {why}")


class Unreachable(GatewayError):
    """An instance broke off; `sent` is true if a byte of the call may have reached it."""

    def __init__(
        self,
        function: FunctionId,
        why: str,
        *,
        sent: bool,
        ended: str = "",
        tells_all: bool = False,
        call_id: str = "",
    ) -> None:
        """`ended` is how its process came to its end, where that is known.

        The caller gets all of it with `tells_all`, else no more than its kind.
        """
        kind = _TOLD_END.match(ended)
        told = ended if tells_all else kind[0] if kind else ""
        log = _its_log(function, call_id)
        super().__init__(f"{function} {_broke_off(told, why)}{log}")
        self.sent = sent
        self._logged = f"{function} {_broke_off(ended, why)}{log}"

    @property
    def logged(self) -> str:
        return self._logged


class TimedOut(GatewayError):
    """The function exceeded its time limit."""

    def __init__(self, function: FunctionId, after_s: float, call_id: str = "") -> None:
        what = f"did not answer within {after_s:g} s"
        super().__init__(f"{function} {what}{_its_log(function, call_id)}")


class CallerGone(GatewayError):
    """The caller disconnected."""

    def __init__(self) -> None:
        super().__init__("the caller left")


class OwnStatus(GatewayError):
    """Its `status` is the caller's HTTP status: somebody else has chosen it."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class NoGpu(OwnStatus):
    """The scheduler gave no lease."""

    def __init__(self, status: int, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(status, why)
        self.retry_after_s = retry_after_s


class ProviderFailed(GatewayError):
    """The provider's operation failed."""


class QueueFailed(GatewayError):
    """The job queue failed."""


class QueueAway(QueueFailed):
    """The job queue cannot be reached."""

    retry_after_s = 5.0

    def __init__(self, why: str) -> None:
        super().__init__(f"the job queue cannot be reached: {why}")


class QueueDiskFull(QueueFailed):
    """The job queue's disk has no room for another job."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the disk of the job queue is full: {error}")


class BodyLost(QueueFailed):
    """The stored body of a job is gone."""


class ClaimLost(QueueFailed):
    """The claim on the job has ended, or another worker holds it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"job {number} is not claimed, or by another")


def _broke_off(ended: str, why: str) -> str:
    return f"{ended} while it answered" if ended else f"broke off: {why}"


def _its_log(function: FunctionId, call_id: str) -> str:
    return f"; its log: {function.log_command}" + (f", call {call_id}" if call_id else "")


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full_disk(error: BaseException) -> bool:
    """Whether an operation failed since there is no room left, for all or for this user."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    full = sqlite3.SQLITE_FULL
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) == full
