"""The bounds on what a caller may ask for, by HTTP or over a stream."""

import math

from scheduler.model.errors import MalformedRequest
from scheduler.model.values import Request

LONGEST_NAME = 512
MOST_MODELS = 64
MOST_S = 1e9
MOST_WHOLE = (1 << 63) - 1  # messages and records carry no larger number


def check_request(request: Request) -> Request:
    """The request as it came, its times relative to now; MalformedRequest says what is wrong."""
    if not 0 < len(request.models) <= MOST_MODELS:
        raise MalformedRequest(f"models: from 1 to {MOST_MODELS} names")
    for name in (request.id, request.function, *request.models):
        if not 0 < len(name) <= LONGEST_NAME:
            raise MalformedRequest(f"a name has from 1 to {LONGEST_NAME} characters")
    if any(len(text) > LONGEST_NAME for text in (request.application, request.stage)):
        raise MalformedRequest(f"a name has at most {LONGEST_NAME} characters")
    if request.near is not None and not 0 < len(request.near) <= LONGEST_NAME:
        raise MalformedRequest(f"near: a name of 1 to {LONGEST_NAME} characters")
    if not 1 <= request.batch <= MOST_WHOLE or abs(request.priority) > MOST_WHOLE:
        raise MalformedRequest(f"batch, priority: at most {MOST_WHOLE}")
    for name in ("deadline_s", "arrived_s", "slo_s", "max_wait_s"):
        value = getattr(request, name)
        if value is not None and not (math.isfinite(value) and abs(value) <= MOST_S):
            raise MalformedRequest(f"{name}: at most {MOST_S:g} seconds")
    return request
