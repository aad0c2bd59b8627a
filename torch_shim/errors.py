"""Errors of the torch shim.

ShimError                 base of all
├── InvalidSetting        an environment variable of ours has a value that means nothing
├── Unsupported           a CUDA call that this shim cannot redirect; it names call and remedy
├── WireError             the stream of frames cannot go on
│   ├── BadFrame          the other side sent nonsense
│   └── ConnectionLost    the other side is gone
│       └── Unreachable   no GPU manager answers at an address
├── NoWeights             a model that is called has no weights on the GPU
└── RemoteFailure         the other side refused a request, or a call failed there
"""

from typing import Any


class ShimError(Exception):
    """Anything the shim raises that PyTorch would not have raised itself."""


class InvalidShimSetting(ShimError):
    """A setting that cannot be used."""

    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"{name}={value!r}: expected {expected}")
        self.name = name
        self.value = value


class UnsupportedCall(ShimError, RuntimeError):
    """A CUDA call without a counterpart here."""

    def __init__(self, call: str, remedy: str) -> None:
        super().__init__(f"gpufaas: {call} is not supported on a redirected GPU; {remedy}")
        self.call = call
        self.remedy = remedy


class WireError(ShimError):
    """The stream of frames cannot go on."""


class BadFrame(WireError):
    """The other side sent what the protocol does not know."""


class ConnectionLost(WireError):
    """The other side is gone, or was never there."""


class ManagerUnreachable(ConnectionLost):
    """There is no GPU manager where one should be."""

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(
            f"no GPU manager answers at {address} ({detail}); start one with "
            "`gpufaas gpu-manager`, or run the program by `gpufaas exec`"
        )
        self.address = address


class NoWeights(ShimError):
    """A model that is called has no weights on the GPU: no worker can compute it."""

    def __init__(self) -> None:
        super().__init__("no weights on the GPU")


class RemoteFailure(ShimError):
    """A request was refused or a call failed on the other side."""

    def __init__(self, failure: str, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(f"{failure}: {message}")
        self.failure = failure
        self.message = message
        self.facts = facts or {}
