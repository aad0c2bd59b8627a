"""Exit rules, one file each; a rule's file name is its name in the configuration. Pure.

A rule is named with its parameters: `never`, `fixed`, `fixed:10`, `fixed:10,20,30,60`.
"""

from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules

from cache_manager.exits.exit_rule import ExitRule
from cache_manager.model.errors import UnknownRule
from common.numerals import number

_NOT_RULES = frozenset({"exit_rule"})
# Functions name rules: as many are kept as may be in use at once.
_MOST_MADE = 1_024


def available() -> tuple[str, ...]:
    """The names of all rules, in alphabetical order."""
    return tuple(sorted(m.name for m in iter_modules(__path__) if m.name not in _NOT_RULES))


def is_rule(text: str) -> bool:
    try:
        make(text)
    except UnknownRule:
        return False
    return True


@lru_cache(maxsize=_MOST_MADE)
def make(text: str) -> ExitRule:
    """The rule that a text names; UnknownRule if none does."""
    name, _, parameters = text.partition(":")
    if name not in available():
        raise UnknownRule(name, available(), kind="exit")
    try:
        numbers = [number(each) for each in parameters.split(",")] if parameters else []
        rule: ExitRule = import_module(f"{__name__}.{name}").Rule.of(numbers)
    except ValueError as error:
        raise UnknownRule(name, available(), str(error), "exit") from error
    return rule
