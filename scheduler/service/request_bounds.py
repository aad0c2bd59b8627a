"""The bounds on what a caller may ask for, by HTTP or over a stream."""

import math

from cache_manager import exits
from scheduler.model.errors import BadValue, MalformedRequest
from scheduler.model.events import LeaseUsed
from scheduler.model.values import Request

LONGEST_NAME = 512
MOST_MODELS = 64
MOST_S = 1e9
MOST_WHOLE = (1 << 63) - 1  # messages and records carry no larger number
_A_NAME = f"a text of 1 to {LONGEST_NAME} printable characters is expected"


def check_name(field: str, text: str) -> str:
    if not _is_name(text):
        raise MalformedRequest(f"{field}: {_A_NAME}")
    return text


def _is_name(text: str) -> bool:
    """Whether a caller may name something so: logs, traces and terminals show it."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


def check_request(request: Request) -> Request:
    """The request as it came, its times relative to now; MalformedRequest says what is wrong."""
    if not 0 < len(request.models) <= MOST_MODELS:
        raise MalformedRequest(f"models: from 1 to {MOST_MODELS} names")
    if not all(map(_is_name, (request.id, request.function, *request.models))):
        raise MalformedRequest(f"request, function, models: {_A_NAME}")
    if not all(not text or _is_name(text) for text in (request.application, request.stage)):
        raise MalformedRequest(f"application, stage: {_A_NAME}")
    if request.near is not None:
        check_name("near", request.near)
    if not 1 <= request.batch <= MOST_WHOLE:
        raise MalformedRequest("batch: a whole number from 1")
    if abs(request.priority) > MOST_WHOLE:
        raise MalformedRequest("priority: a whole number")
    check_exit_rule(request)
    for name in ("deadline_s", "arrived_s", "slo_s", "max_wait_s"):
        value = getattr(request, name)
        if value is not None and not (math.isfinite(value) and abs(value) <= MOST_S):
            raise MalformedRequest(f"{name}: at most {MOST_S:g} seconds")
    return request


def check_exit_rule(request: Request) -> Request:
    """The request as it came; MalformedRequest if it names a rule that the core could not make."""
    rule = request.exit_rule
    if rule and not (_is_name(rule) and exits.is_rule(rule)):
        raise MalformedRequest(f"exit_rule: {rule[:80]!r} is no exit rule")
    return request


def check_report(report: LeaseUsed) -> LeaseUsed:
    """The report as it came, its times relative to now; BadValue if it is out of bounds."""
    names = [use.request for use in report.uses] + [end.request for end in report.ends]
    if not all(map(_is_name, (report.function, *names))):
        raise BadValue(f"a name in a report has from 1 to {LONGEST_NAME} printable characters")
    if any(len(use.parent) > LONGEST_NAME for use in report.uses):
        raise BadValue(f"a trace in a report has at most {LONGEST_NAME} characters")
    times = [end.ended_s for end in report.ends]
    for use in report.uses:
        times += (use.arrived_s, use.began_s, 0.0 if use.ended_s is None else use.ended_s)
    if not all(math.isfinite(time_s) and abs(time_s) <= MOST_S for time_s in times):
        raise BadValue(f"a time in a report is at most {MOST_S:g} seconds from now")
    if not 1 <= report.batch <= MOST_WHOLE:
        raise BadValue(f"batch in a report: from 1 to {MOST_WHOLE}")
    return report
