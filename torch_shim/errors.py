"""Errors of the torch shim.

ShimError                 base of all
├── InvalidShimSetting            a GPUFAAS_* environment variable has an invalid value
├── UnsupportedCall               the shim cannot redirect a CUDA call; it names call and remedy
├── WireError                     the stream of frames cannot continue
│   ├── BadFrame                  the peer sent a frame that violates the protocol
│   └── ConnectionLost            the peer closed the connection, or is not reachable
│       └── ManagerUnreachable    no GPU manager answers at an address
├── UnsuitableData                a value cannot be put for other functions
├── DataUnavailable               data of a handle cannot be had, or cannot be put now
├── NoWeights                     a model that is called has no weights on the GPU
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


class ConnectionLost(WireError):
    """The peer closed the connection, or is not reachable."""


class ManagerUnreachable(ConnectionLost):
    """No GPU manager answers at an address."""

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


class NoWeights(ShimError):
    """A model that is called has no weights on the GPU, so no worker can run it."""

    def __init__(self) -> None:
        super().__init__("no weights on the GPU")


class RemoteFailure(ShimError):
    """The peer refused a request, or a call failed there."""

    def __init__(self, failure: str, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(f"{failure}: {message}")
        self.failure = failure
        self.message = message
        self.facts = facts or {}
