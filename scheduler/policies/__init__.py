"""Placement policies, one file each; a policy's file name is its name in the configuration.

Other distributions bring theirs by entry points of the group `gpufaas.policies`.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec
from inspect import getdoc
from pkgutil import iter_modules
from types import ModuleType
from typing import NamedTuple, get_args, get_type_hints

from scheduler.model.errors import AmbiguousPolicy, BadParameter, UnknownPolicy
from scheduler.policies.placement_policy import Policy

_LARGEST = 1e15
GROUP = "gpufaas.policies"
_NOT_POLICIES = frozenset({"placement_policy", "weighing"})


class Described(NamedTuple):
    """A policy's own description, and its parameters: defaults and meanings."""

    name: str
    summary: str
    rule: str
    parameters: dict[str, float]
    meanings: dict[str, str]


def available() -> tuple[str, ...]:
    """The names of all policies, in alphabetical order."""
    return tuple(modules())


@cache
def modules() -> Mapping[str, str]:
    """The module of each policy, by its name: those of this folder, and those that others bring.

    They are read once a process. AmbiguousPolicy is raised if two of them have one name.
    """
    ours = (module.name for module in iter_modules(__path__) if module.name not in _NOT_POLICIES)
    by_name = {name: f"{__name__}.{name}" for name in ours}
    owners = dict.fromkeys(by_name, "gpufaas itself")
    for entry in entry_points(group=GROUP):
        if entry.name in by_name:
            raise AmbiguousPolicy(entry.name, (owners[entry.name], _owner(entry)))
        by_name[entry.name] = entry.value
        owners[entry.name] = _owner(entry)
    return {name: by_name[name] for name in sorted(by_name)}


def make(name: str, parameters: Mapping[str, float] | None = None) -> Policy:
    types = _parameters(name)
    chosen = {}
    for parameter, value in (parameters or {}).items():
        if parameter not in types:
            has = ", ".join(sorted(types)) or "none"
            raise BadParameter(name, parameter, f"it has no such parameter; it has: {has}")
        chosen[parameter] = _checked(name, parameter, value, types[parameter])
    policy: Policy = _kind(name)(**chosen)
    return policy


def takes(name: str, parameter: str) -> bool:
    return parameter in _parameters(name)


def lead_s(policy: Policy) -> float:
    """How far a policy looks ahead of the first turn, in seconds; 0: it sees all that waits.

    Any policy may have this as a parameter: then namespaces share the GPUs by their weights.
    """
    return float(getattr(policy, "lead_s", 0.0))


def describe(name: str) -> Described:
    """A policy's description, from its docstring, and its parameters."""
    module = _as_written(name)
    kind: type = module.Policy
    summary = (module.__doc__ or "").partition("\n")[0]
    parameters: dict[str, float] = {
        field.name: getattr(kind(), field.name) for field in fields(kind)
    }
    return Described(name, summary, getdoc(kind) or "", parameters, _meanings(kind))


def _kind(name: str) -> type:
    if name not in modules():
        raise UnknownPolicy(name, available())
    kind: type | None = getattr(_module(name), "Policy", None)
    if kind is None or not is_dataclass(kind):
        raise UnknownPolicy(name, available(), "its `Policy` is no dataclass")
    return kind


def _module(name: str) -> ModuleType:
    try:
        return import_module(modules()[name])
    except (ImportError, SyntaxError) as error:
        detail = f"its module {modules()[name]!r} cannot be imported: {error}"
        raise UnknownPolicy(name, available(), detail) from error


def _as_written(name: str) -> ModuleType:
    """The policy's module from its source: compiled, it has neither docstrings nor meanings."""
    _kind(name)
    module = _module(name)
    if module.__package__ != __name__:
        return module
    spec = PathFinder.find_spec(module.__name__, __path__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _owner(entry: EntryPoint) -> str:
    """Who brings a policy, as a person would uninstall it."""
    if entry.dist is None:
        return entry.value
    return f"the distribution {entry.dist.name} ({entry.value})"


def _parameters(name: str) -> dict[str, type]:
    """Each parameter's type: that of its default."""
    return {field.name: type(field.default) for field in fields(_kind(name))}


def _meanings(kind: type) -> dict[str, str]:
    """What each parameter is for: the text beside its type, `Annotated[int, "this"]`."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: "".join(get_args(hints[field.name])[1:]) for field in fields(kind)}


def _checked(policy: str, parameter: str, value: object, kind: type) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadParameter(policy, parameter, f"must be a number, not {value!r}")
    if not abs(value) <= _LARGEST:  # also refuses NaN
        raise BadParameter(policy, parameter, "must be a number of ordinary size")
    if kind is int and value != int(value):
        raise BadParameter(policy, parameter, f"must be a whole number, not {value!r}")
    return int(value) if kind is int else value
