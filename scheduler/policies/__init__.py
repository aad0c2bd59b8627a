"""Placement policies, one file each; a policy's file name is its name in the configuration."""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules

from scheduler.errors import BadParameter, UnknownPolicy
from scheduler.policies.base import Policy

_NOT_POLICIES = frozenset({"base"})


def available() -> tuple[str, ...]:
    """The names of all policies, in alphabetical order."""
    return tuple(sorted(m.name for m in iter_modules(__path__) if m.name not in _NOT_POLICIES))


def make(name: str, parameters: Mapping[str, float] | None = None) -> Policy:
    """The policy of that name with these parameters, the others at their defaults."""
    if name not in available():
        raise UnknownPolicy(name, available())
    kind = import_module(f"{__name__}.{name}").Policy
    known = {field.name for field in fields(kind)}
    for parameter in parameters or {}:
        if parameter not in known:
            has = ", ".join(sorted(known)) or "none"
            raise BadParameter(name, parameter, f"it has no such parameter; it has: {has}")
    policy: Policy = kind(**(parameters or {}))
    return policy


def takes(name: str, parameter: str) -> bool:
    """Whether the policy of that name has such a parameter."""
    if name not in available():
        raise UnknownPolicy(name, available())
    kind = import_module(f"{__name__}.{name}").Policy
    return parameter in {field.name for field in fields(kind)}
