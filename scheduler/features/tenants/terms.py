"""The terms of owners: set by operators, told by callers, and in force."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from scheduler.model.errors import BadValue
from scheduler.model.owner_terms import OwnerTerms, check_owner, check_terms, is_function
from scheduler.wire.caller_stream import ToldTerms

OPERATOR, FUNCTION = "operator", "function"
# Functions whose own terms are kept; those of further ones are left out.
MOST_FUNCTIONS = 20_000

# What a caller told is kept for this long after its stream: a gateway may start again meanwhile.
KEPT_S = 60.0

log = logging.getLogger(__name__)

Apply = Callable[[str, OwnerTerms | None], object]


class TermsInForce(NamedTuple):
    """The terms of one owner, and who set them: an operator, or the function by annotations."""

    terms: OwnerTerms
    set_by: str


class TermsBook:
    """Has the core know the terms of every owner.

    What an operator set of an owner replaces what the function says of itself. A function's own
    terms come from callers (gateways); of several callers the one that told last decides.
    """

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._streams: Counter[str] = Counter()
        self._is_full = False
        self.of_operators: dict[str, OwnerTerms] = {}
        self._own: dict[str, dict[str, OwnerTerms]] = {}
        self._in_force: dict[str, OwnerTerms] = {}

    def set(self, owner: str, terms: OwnerTerms | None) -> None:
        """An operator sets the terms of an owner; None: no longer."""
        if terms is None:
            self.of_operators.pop(owner, None)
        else:
            self.of_operators[owner] = terms
        self._update(owner)

    @contextmanager
    def present(self, caller: str) -> Iterator[None]:
        """What a caller tells is forgotten some time after the last of its streams has ended."""
        self._streams[caller] += 1
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(KEPT_S, self._left, caller)

    def take(self, caller: str, message: ToldTerms) -> None:
        """Take one message in; BadValue if it is out of bounds, and then nothing of it is taken."""
        for own in message.functions:
            if not is_function(check_owner(own.function)):
                raise BadValue("a caller tells the terms of functions, not of namespaces")
            if own.terms is not None:
                check_terms(own.terms)
        if message.begins:
            named = {own.function for own in message.functions}
            for function in self._told_by(caller):
                if function not in named:
                    self._forget(caller, function)
        for own in message.functions:
            self.tell(caller, own.function, own.terms)

    def tell(self, caller: str, function: str, terms: OwnerTerms | None) -> None:
        """A caller tells a function's own terms, unless too many functions have some."""
        if terms is None:
            self._forget(caller, function)
            return
        if function not in self._own and len(self._own) >= MOST_FUNCTIONS:
            if not self._is_full:
                self._is_full = True
                log.warning("%s: too many functions have terms of their own", function)
            return
        told = self._own.setdefault(function, {})
        told.pop(caller, None)
        told[caller] = terms
        self._update(function)

    def get(self, owner: str) -> TermsInForce | None:
        """The terms in force of an owner; None if it has none."""
        terms = self._in_force.get(owner)
        if terms is None:
            return None
        return TermsInForce(terms, OPERATOR if owner in self.of_operators else FUNCTION)

    def __iter__(self) -> Iterator[str]:
        """Every owner that has terms, in the order of their names."""
        return iter(sorted(self._in_force))

    def __len__(self) -> int:
        return len(self._in_force)

    def _left(self, caller: str) -> None:
        self._streams[caller] -= 1
        if not self._streams[caller]:
            del self._streams[caller]
            for function in self._told_by(caller):
                self._forget(caller, function)

    def _told_by(self, caller: str) -> list[str]:
        return [function for function, told in self._own.items() if caller in told]

    def _forget(self, caller: str, function: str) -> None:
        told = self._own.get(function)
        if told is None:
            return
        told.pop(caller, None)
        if not told:
            del self._own[function]
        self._update(function)

    def _update(self, owner: str) -> None:
        """Tell the core if other terms are in force now."""
        terms = self.of_operators.get(owner)
        if terms is None and owner in self._own:
            terms = next(reversed(self._own[owner].values()))
        if terms == self._in_force.get(owner):
            return
        if terms is None:
            del self._in_force[owner]
        else:
            self._in_force[owner] = terms
        self._apply(owner, terms)
