"""Code whose trace failed in a call: Dynamo passes over it from then on only if the call succeeds.

An input that a module refuses makes its trace fail, too, and the next call may be a good one.
"""

import sys
import threading
from collections.abc import Callable
from types import CodeType

from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import ResumePrologueTracingError, UncapturedHigherOrderOpError

_ALWAYS_RAISED = (ResumePrologueTracingError, UncapturedHigherOrderOpError)


class _Call(threading.local):
    """What this thread calls of what Dynamo compiled."""

    failed: list[CodeType] | None = None  # what it could not trace; None where Dynamo has to raise


_call = _Call()


def begin_call(*, is_one_graph: bool) -> Callable[[], None]:
    """Begin a call of what Dynamo compiled; return what ends it.

    Only then Dynamo passes over the code whose trace failed, unless the call fails as well. Of
    what has to be one graph the trace itself fails.
    """
    before, handled = _call.failed, sys.exception()
    failed = _call.failed = None if is_one_graph else []

    def end() -> None:
        _call.failed = before
        if sys.exception() is handled:
            for code in failed or ():
                skip_code(code)

    return end


def is_undecided(code: CodeType, error: Exception) -> bool:
    """Whether the call has to show if code can be traced; not if it went on after this code."""
    if _call.failed is None or code in _call.failed or _says_what_follows(error):
        return False
    _call.failed.append(code)
    return True


def _says_what_follows(error: Exception) -> bool:
    """Whether Dynamo raises the error in any case, or learns from it how the code is to run."""
    strategy = getattr(error, "frame_exec_strategy", None)
    applies = getattr(error, "apply_to_code", True)
    return isinstance(error, _ALWAYS_RAISED) or strategy is not None or not applies
