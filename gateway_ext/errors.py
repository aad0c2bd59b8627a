"""Everything that the gateway raises.

GatewayError
├── BadRequest            what was sent makes no sense
│   ├── BadDeployment     a function that cannot be deployed so
│   └── WrongMethod       this path does not take that method
├── NotAllowed            no credentials, or wrong ones
├── CrossSite             another site's page asks, with the credentials that a browser keeps
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
├── Unsupported           this provider cannot do it
├── TooLarge              a body beyond the limit
├── TooSlow               a body that does not come
├── Busy                  a function's queue is full: try again after `retry_after_s`
├── NoInstance            nothing of the function is ready, and nothing becomes so
├── Unreachable           an instance broke off; `sent` says whether it may have begun
├── TimedOut              the function took longer than it may
├── CallerGone            nobody waits for the answer any more
├── NoGpu                 the scheduler gave no lease; `status` is what the caller is told
├── Declined              the scheduler did not do what the page asked it; `status` likewise
├── ProviderFailed        the provider did not do what it should have
└── QueueFailed           the queue of jobs cannot keep what it should
    ├── QueueAway         it cannot be reached now: try again after `retry_after_s`
    ├── BodyLost          what it had kept of a job is gone
    └── ClaimLost         a job is another's, or nobody's, by now
"""

from gateway_ext.model import FunctionId


class GatewayError(Exception):
    """Base of all; the text is for the caller."""


class BadRequest(GatewayError):
    """What was sent makes no sense."""


class BadDeployment(BadRequest):
    """A function that cannot be deployed so."""


class WrongMethod(BadRequest):
    """This path does not take that method."""

    def __init__(self, method: str) -> None:
        super().__init__(f"{method} is not allowed here")


class NotAllowed(GatewayError):
    """No credentials, or wrong ones."""

    def __init__(self) -> None:
        super().__init__("invalid credentials")


class CrossSite(GatewayError):
    """Another site's page asks, with the credentials that a browser keeps."""


class Unknown(GatewayError):
    """There is none of that name."""


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
    """It is there already, or something else needs it."""


class SecretExists(Conflict):
    """There is a secret of that name."""

    def __init__(self, namespace: str, name: str) -> None:
        super().__init__(f"secret {name} is in {namespace} already")


class SecretInUse(Conflict):
    """A function has it mounted."""

    def __init__(self, name: str, function: FunctionId) -> None:
        super().__init__(f"secret {name} is used by {function}")


class NamespaceExists(Conflict):
    """There is a namespace of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a namespace {name} already")


class JobExists(Conflict):
    """A job with this call id waits already."""

    def __init__(self, function: FunctionId, call_id: str) -> None:
        super().__init__(f"a job of {function} with the call id {call_id} waits already")


class Unsupported(GatewayError):
    """This provider cannot do it."""


class TooLarge(GatewayError):
    """A body beyond the limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the body is larger than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class TooSlow(GatewayError):
    """A body that does not come."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"the body did not come within {after_s:g} s")


class Busy(GatewayError):
    """A function's queue is full."""

    def __init__(self, function: FunctionId, retry_after_s: float) -> None:
        super().__init__(f"{function} has as many calls as it takes")
        self.retry_after_s = retry_after_s


class NoInstance(GatewayError):
    """Nothing of the function is ready, and nothing becomes so."""

    def __init__(self, function: FunctionId, why: str) -> None:
        super().__init__(f"no instance of {function} is ready: {why}")


class Unreachable(GatewayError):
    """An instance broke off; `sent` says whether a byte of the call may have reached it."""

    def __init__(self, function: FunctionId, why: str, *, sent: bool) -> None:
        super().__init__(f"{function} broke off: {why}")
        self.sent = sent


class TimedOut(GatewayError):
    """The function took longer than it may."""

    def __init__(self, function: FunctionId, after_s: float) -> None:
        super().__init__(f"{function} did not answer within {after_s:g} s")


class CallerGone(GatewayError):
    """Nobody waits for the answer any more."""

    def __init__(self) -> None:
        super().__init__("the caller left")


class NoGpu(GatewayError):
    """The scheduler gave no lease; `status` is what the caller is told."""

    def __init__(self, status: int, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.retry_after_s = retry_after_s


class Declined(GatewayError):
    """The scheduler did not do what the page asked it; `status` is what the page is told."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class ProviderFailed(GatewayError):
    """The provider did not do what it should have."""


class QueueFailed(GatewayError):
    """The queue of jobs cannot keep what it should."""


class QueueAway(QueueFailed):
    """It cannot be reached now."""

    def __init__(self, why: str, retry_after_s: float = 5.0) -> None:
        super().__init__(f"the job queue cannot be reached: {why}")
        self.retry_after_s = retry_after_s


class BodyLost(QueueFailed):
    """What it had kept of a job is gone."""


class ClaimLost(QueueFailed):
    """Who says what became of a job does not have it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"job {number} is not claimed, or by another")
