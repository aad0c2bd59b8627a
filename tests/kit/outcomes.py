"""Tables in one test: what each entry's call comes to, so that one run names all wrong ones."""

import re
from collections.abc import Awaitable, Callable


def outcome(call: Callable[..., object], *arguments: object, **named: object) -> object:
    """What the call returns, or the exception that it raises."""
    try:
        return call(*arguments, **named)
    except Exception as error:  # noqa: BLE001 - the test compares it with what its table says
        return error


async def awaited_outcome(result: Awaitable[object]) -> object:
    """What comes of waiting for it, or the exception that it raises."""
    try:
        return await result
    except Exception as error:  # noqa: BLE001 - as above
        return error


def instead_of(
    error: type[Exception] | tuple[type[Exception], ...],
    call: Callable[..., object],
    *arguments: object,
    match: str = "",
    **named: object,
) -> str:
    """What the call comes to, unless it raises this error with a text that matches: then ''."""
    result = outcome(call, *arguments, **named)
    if isinstance(result, error) and re.search(match, str(result)):
        return ""
    return f"raised {result!r}" if isinstance(result, Exception) else f"returned {result!r}"
