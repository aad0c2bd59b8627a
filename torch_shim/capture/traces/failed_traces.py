"""Code whose trace failed in a call: Dynamo passes over it from then on only if the call succeeds.

An input that a module refuses makes its trace fail, too, and the next call may be a good one.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import ResumePrologueTracingError, UncapturedHigherOrderOpError

_ALWAYS_RAISED = (ResumePrologueTracingError, UncapturedHigherOrderOpError)


class _Call(threading.local):
    """The code that this thread could not trace in its call; None outside of calls that trace."""

    failed: list[CodeType] | None = None


_call = _Call()


@contextmanager
def decided_by_the_call() -> Iterator[None]:
    """Have Dynamo pass over the code whose trace fails inside, unless the call fails as well."""
    before, failed = _call.failed, list[CodeType]()
    _call.failed = failed
    try:
        yield
        for code in failed:
            skip_code(code)
    finally:
        _call.failed = before


def is_undecided(code: CodeType, error: Exception) -> bool:
    """Whether the call has to show if code can be traced; not if it went on after this code."""
    if _call.failed is None or code in _call.failed or isinstance(error, _ALWAYS_RAISED):
        return False
    _call.failed.append(code)
    return True
