"""Eviction rules, one file each; a rule's file name is its name in the configuration."""

from importlib import import_module
from pkgutil import iter_modules

from cache_manager.eviction.eviction_rule import EvictionRule
from cache_manager.model.errors import UnknownRule

_NOT_RULES = frozenset({"eviction_rule"})


def available() -> tuple[str, ...]:
    """The names of all rules, in alphabetical order."""
    return tuple(sorted(m.name for m in iter_modules(__path__) if m.name not in _NOT_RULES))


def make(name: str) -> EvictionRule:
    """UnknownRule if no rule has this name."""
    if name not in available():
        raise UnknownRule(name, available())
    rule: EvictionRule = import_module(f"{__name__}.{name}").Rule()
    return rule
