"""Errors of the torch shim.

ShimError                 base of all
├── InvalidShimSetting            a GPUFAAS_* environment variable has an invalid value
├── UnsupportedCall               the shim cannot redirect a CUDA call; it names call and remedy
├── WireError                     the stream of frames cannot continue
│   ├── BadFrame                  the peer sent a frame that violates the protocol
│   │   └── OtherVersion          the peer speaks another version of the protocol
│   └── ConnectionLost            the peer closed the connection, or is not reachable
│       └── ManagerUnreachable    no GPU manager answers at an address
├── UnsuitableData                a value cannot be put for other functions
├── DataUnavailable               data of a handle cannot be had, or cannot be put now
│   └── DataUnreachable           this node's GPU manager does not answer
├── NoWeights                     a model that is called has no weights on the GPU
├── QuotaUsedUp                   the scheduler grants no lease: a quota is used up
├── GpuQueueFull                  the scheduler grants no lease: too many requests wait
├── GpuUnavailable                what a call needs of a GPU was lost; a later call may succeed
└── RemoteFailure                 the peer refused a request, or a call failed there
"""

from typing import Any


class ShimError(Exception):
    """Base of the errors that the shim raises and PyTorch would not raise."""


class InvalidShimSetting(ShimError):
    """A setting has an invalid value."""

    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"{name}={value!r}: expected {expected}")
        self.name = name
        self.value = value


class UnsupportedCall(ShimError, RuntimeError):
    """A CUDA call that the shim does not support."""

    def __init__(self, call: str, remedy: str) -> None:
        super().__init__(f"gpufaas: {call} is not supported on a redirected GPU; {remedy}")
        self.call = call
        self.remedy = remedy


class WireError(ShimError):
    """The stream of frames cannot continue."""


class BadFrame(WireError):
    """The peer sent a frame that violates the protocol."""


class OtherVersion(BadFrame):
    """The peer speaks another version of the wire protocol; the text says what to upgrade.

    A runtime that serves the function answers by `answer_status`.
    """

    answer_status = 503

    def __init__(self, theirs: int, ours: int) -> None:
        behind = "the other end" if theirs < ours else "this end"
        super().__init__(
            f"the other end speaks version {theirs} of the wire protocol, this end version {ours}: "
            f"upgrade gpufaas at {behind}; each function's image has a gpufaas of its own"
        )
        self.theirs = theirs
        self.ours = ours


class ConnectionLost(WireError):
    """The peer closed the connection, or is not reachable."""


class ManagerUnreachable(ConnectionLost):
    """No GPU manager answers at an address.

    A runtime that serves the function answers by `answer_status`, as for all errors with one.
    """

    answer_status = 503

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(
            f"no GPU manager answers at {address} ({detail}); start one with "
            "`gpufaas gpu-manager`, or run the program by `gpufaas exec`"
        )
        self.address = address


class UnsuitableData(ShimError, TypeError):
    """A value that cannot be put for other functions; the text says what it has in it."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"the value cannot be put: {detail}; tensors, bytes, text, numbers, None, and lists, "
            "tuples and dictionaries of these can"
        )


class DataUnavailable(ShimError, LookupError):
    """Data cannot be had by this handle, or cannot be put now; the text says why."""


class DataUnreachable(DataUnavailable):
    """This node's GPU manager does not answer: the call may be made again."""

    answer_status = 503


class NoWeights(ShimError):
    """A model that is called has no weights on the GPU, so no worker can run it."""

    def __init__(self) -> None:
        super().__init__("no weights on the GPU")


class QuotaUsedUp(ShimError, RuntimeError):
    """A quota of the function or its namespace is used up; the text names quota and owner."""

    answer_status = 429

    def __init__(self, detail: str) -> None:
        super().__init__(f"gpufaas: no GPU for this call: {detail}")


class GpuQueueFull(ShimError, RuntimeError):
    """More requests wait for a GPU than the scheduler takes: the call may be made later."""

    answer_status = 429


class GpuUnavailable(ShimError, RuntimeError):
    """What a call needs of a GPU was lost, for which the call is not to blame.

    The GPU manager, its node, a worker or the request for a lease has ended. The call may be made
    again as a whole.
    """

    answer_status = 503


class RemoteFailure(ShimError):
    """The peer refused a request, or a call failed there."""

    def __init__(self, failure: str, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(f"{failure}: {message}")
        self.failure = failure
        self.message = message
        self.facts = facts or {}
