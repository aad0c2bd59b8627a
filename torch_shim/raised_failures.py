"""What user code gets where work on a GPU failed for good: an error as torch has them."""

from collections.abc import Mapping

from torch_shim.errors import GpuQueueFull, GpuUnavailable, RemoteFailure
from torch_shim.wire.protocol import FailureKind

# The fact of a failure that says how many workers a call has lost.
CRASHES = "crashes"

_LATER: Mapping[str, type[RuntimeError]] = {
    FailureKind.LOST: GpuUnavailable,
    FailureKind.CANCELLED: GpuUnavailable,
    FailureKind.EXPIRED: GpuUnavailable,
    FailureKind.QUEUE_FULL: GpuQueueFull,
}


def error_of(failure: RemoteFailure, text: str = "") -> RuntimeError:
    """The error to raise, with another text if one is given.

    A call that lost one worker after the other may be what ends them: it is not to be made again.
    """
    kind = RuntimeError if CRASHES in failure.facts else _LATER.get(failure.failure, RuntimeError)
    return kind(f"CUDA error: {text or failure}")
