"""What is answered and logged when a handler raises."""

import traceback
from typing import NamedTuple

_FAILED = 500
_TRY_LATER = frozenset({429, 503})


class HandlerFailure(NamedTuple):
    """The status and the text of the answer, and the text of the log."""

    status: int
    why: str
    logged: str


def failure_of(error: BaseException) -> HandlerFailure:
    """An error of the handler is answered 500; one of the shim's says that the call may come later.

    `answer_status` is what the shim's errors carry: the runtime does not import the shim.
    """
    status = getattr(error, "answer_status", None)
    if status in _TRY_LATER:
        return HandlerFailure(status, str(error), f"was put off: {error}")
    raised = "".join(traceback.format_exception(error)).rstrip()
    why = f"the function raised {type(error).__name__}"
    return HandlerFailure(_FAILED, why, f"raised\n{raised}")
