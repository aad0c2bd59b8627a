"""The bounds that policies' parameters have in common."""

from dataclasses import fields
from typing import Any

from scheduler.model.errors import BadParameter


def check_bounds(policy: str, chosen: Any, *from_one: str) -> None:
    """Raise BadParameter if a parameter of the policy is below 0, or one of these below 1."""
    for field in fields(chosen):
        if getattr(chosen, field.name) < 0:
            raise BadParameter(policy, field.name, "must be 0 or more")
    for name in from_one:
        if getattr(chosen, name) < 1:
            raise BadParameter(policy, name, "must be 1 or more")
