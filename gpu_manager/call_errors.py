"""Why a worker does not answer a call with a result."""

import traceback
from typing import Any

from gpu_manager.errors import GpuManagerError
from torch_shim.wire.protocol import FailureKind


class CallRefused(GpuManagerError):
    """A request that the worker answers with FAILED; the channel goes on."""

    def __init__(
        self, failure: FailureKind, detail: str, facts: dict[str, Any] | None = None
    ) -> None:
        self.failure = failure
        self.detail = detail
        self.facts = facts or {}
        super().__init__(f"{failure}: {detail}")


class OutOfMemory(GpuManagerError):
    """A call needs more than the worker may use: `need_bytes` in all, as far as is known.

    `by_others` where the call's model may have that much, and others of the process have it now.
    """

    def __init__(self, need_bytes: int, detail: str, *, by_others: bool = False) -> None:
        self.need_bytes = need_bytes
        self.by_others = by_others
        super().__init__(detail)


class ShareRefused(GpuManagerError):
    """A share of a GPU's multiprocessors that a model wishes for, and that this GPU cannot give."""

    def __init__(self, share: float, why: str) -> None:
        super().__init__(f"com.gpufaas.share: {100 * share:.3g} % of this GPU: {why}")


class CannotBorrow(GpuManagerError):
    """What another process lends cannot be opened here; the text is the reason."""


class CannotRecord(GpuManagerError):
    """Work that cannot be recorded and replayed; the text is the driver's reason."""


class ContextLost(GpuManagerError):
    """A fault after which every call of this process on the GPU fails: only its end helps.

    `of_program` where the program itself has caused it (an index out of bounds on the GPU): then
    another worker would come to the same end.
    """

    def __init__(self, detail: str, *, of_program: bool) -> None:
        self.of_program = of_program
        super().__init__(detail)


def clear_frames(error: BaseException | None) -> None:
    """Clear what the functions hold that an error ended, before memory is asked for again.

    A traceback keeps their variables: all tensors of a program that failed half-way.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
