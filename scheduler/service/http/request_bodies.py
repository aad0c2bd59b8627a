"""Bodies of callers' requests, read strictly: JSON objects with known fields of the right types."""

from typing import Any

from pydantic_core import from_json

from cache_manager import exits
from cache_manager.model.ids import ModelId, NodeId
from scheduler.model.errors import MalformedRequest
from scheduler.model.events import LeaseReleased
from scheduler.model.values import LeaseId, Request, RequestId
from scheduler.service.request_bounds import LONGEST_NAME, MOST_MODELS, MOST_S, MOST_WHOLE, is_name

_ACQUIRE = frozenset(
    {
        "request",
        "function",
        "models",
        "batch",
        "deadline_in_s",
        "waited_s",
        "priority",
        "application",
        "stage",
        "slo_s",
        "near",
        "registered_only",
        "max_wait_s",
        "exit_rule",
    }
)
_MOST_LEASES = 4_096

Fields = dict[str, Any]


def acquire(body: bytes, now_s: float) -> Request:
    """The request; its body's times are relative, its own times are the scheduler's."""
    fields = _fields(body, _ACQUIRE)
    models = fields.get("models")
    if not isinstance(models, list) or not 0 < len(models) <= MOST_MODELS:
        raise MalformedRequest(f"models: from 1 to {MOST_MODELS} names")
    deadline_in_s = _seconds(fields, "deadline_in_s")
    waited_s = _seconds(fields, "waited_s")
    near = _text(fields, "near", None)
    registered_only = fields.get("registered_only", False)
    if not isinstance(registered_only, bool):
        raise MalformedRequest("registered_only: true or false")
    exit_rule = _text(fields, "exit_rule", None)
    if exit_rule and not exits.is_rule(exit_rule):
        raise MalformedRequest(f"exit_rule: {exit_rule[:80]!r} is no exit rule")
    return Request(
        id=RequestId(_name(fields, "request")),
        function=_name(fields, "function"),
        models=tuple([ModelId(_checked_name("models", each)) for each in models]),
        batch=_whole(fields, "batch", 1, least=1),
        deadline_s=None if deadline_in_s is None else now_s + deadline_in_s,
        priority=_whole(fields, "priority", 0),
        arrived_s=now_s if waited_s is None else max(0.0, now_s - waited_s),
        application=_text(fields, "application", "") or "",
        stage=_text(fields, "stage", "") or "",
        slo_s=_seconds(fields, "slo_s"),
        near=None if near is None else NodeId(near),
        registered_only=registered_only,
        max_wait_s=_seconds(fields, "max_wait_s"),
        exit_rule=exit_rule,
    )


def request(body: bytes) -> RequestId:
    """The id of the request that asks for another lease, or is cancelled."""
    return RequestId(_name(_fields(body, frozenset({"request"})), "request"))


def release(body: bytes) -> LeaseReleased:
    """The lease that is given back, whether its request may come back, and which one it is."""
    fields = _fields(body, frozenset({"lease", "may_return", "request"}))
    may_return = fields.get("may_return", False)
    if not isinstance(may_return, bool):
        raise MalformedRequest("may_return: true or false")
    if "lease" not in fields:
        raise MalformedRequest("lease: missing")
    request = _text(fields, "request", None)
    named = None if request is None else RequestId(request)
    return LeaseReleased(LeaseId(_whole(fields, "lease", 0, least=1)), may_return, named)


def presence(body: bytes) -> tuple[str, tuple[LeaseId, ...]]:
    """The name under which a caller acquires leases, and the leases that it holds already."""
    fields = _fields(body, frozenset({"caller", "leases"}))
    leases = fields.get("leases", [])
    if not isinstance(leases, list) or len(leases) > _MOST_LEASES:
        raise MalformedRequest(f"leases: a list of at most {_MOST_LEASES} numbers")
    if not all(type(lease) is int for lease in leases):
        raise MalformedRequest("leases: whole numbers")
    return _name(fields, "caller"), tuple(map(LeaseId, leases))


def _fields(body: bytes, known: frozenset[str]) -> Fields:
    try:
        fields = from_json(body)
    except ValueError as error:
        raise MalformedRequest(f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedRequest("a JSON object is expected")
    if not fields.keys() <= known:
        strangers = ", ".join(sorted(fields.keys() - known))
        raise MalformedRequest(f"unknown: {strangers}; known: {', '.join(sorted(known))}")
    return fields


def _name(fields: Fields, field: str) -> str:
    if field not in fields:
        raise MalformedRequest(f"{field}: missing")
    return _checked_name(field, fields[field])


def _checked_name(field: str, value: object) -> str:
    if not isinstance(value, str) or not is_name(value):
        wanted = f"a text of 1 to {LONGEST_NAME} printable characters"
        raise MalformedRequest(f"{field}: {wanted} is expected")
    return value


def _text(fields: Fields, field: str, missing: str | None) -> str | None:
    value = fields.get(field)
    return missing if value is None else _checked_name(field, value) if value else missing


def _whole(fields: Fields, field: str, missing: int, least: int | None = None) -> int:
    value = fields.get(field, missing)
    if (
        type(value) is not int
        or not (-MOST_WHOLE if least is None else least) <= value <= MOST_WHOLE
    ):
        raise MalformedRequest(
            f"{field}: a whole number{'' if least is None else f' from {least}'}"
        )
    return value


def _seconds(fields: Fields, field: str) -> float | None:
    value = fields.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedRequest(f"{field}: seconds")
    if not 0.0 <= value <= MOST_S:  # nor is NaN
        raise MalformedRequest(f"{field}: from 0 to {MOST_S:g} seconds")
    return float(value)
