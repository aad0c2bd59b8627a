"""The terms in force of one leader: those that operators set, then those of functions' own."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from scheduler.model.owner_terms import OwnerTerms

OPERATOR, FUNCTION = "operator", "function"
# Functions whose own terms are kept; those of further ones are left out.
MOST_FUNCTIONS = 20_000

Apply = Callable[[str, OwnerTerms | None], None]


class TermsInForce(NamedTuple):
    """The terms of one owner, and who set them: an operator, or the function by annotations."""

    terms: OwnerTerms
    set_by: str


class TermsBook:
    """Has the core know the terms of every owner.

    What an operator set of an owner replaces what the function says of itself. A function's own
    terms come from callers (gateways); of several callers the one that told last decides.
    """

    def __init__(self, apply: Apply, of_operators: Mapping[str, OwnerTerms]) -> None:
        self._apply = apply
        self._of_operators: dict[str, OwnerTerms] = {}
        self._own: dict[str, dict[str, OwnerTerms]] = {}
        self._in_force: dict[str, OwnerTerms] = {}
        # Of owners that have terms: how many requests each quota has refused in this term.
        self.refused: dict[str, Counter[str]] = {}
        for owner, terms in of_operators.items():
            self.set(owner, terms)

    def set(self, owner: str, terms: OwnerTerms | None) -> None:
        """An operator sets the terms of an owner; None: no longer."""
        if terms is None:
            self._of_operators.pop(owner, None)
        else:
            self._of_operators[owner] = terms
        self._update(owner)

    def tell(self, caller: str, function: str, terms: OwnerTerms | None) -> bool:
        """A caller tells a function's own terms; False if too many functions have some."""
        told = self._own.get(function)
        if terms is None:
            if told is not None:
                self._forget(function, told, caller)
            return True
        if told is None:
            if len(self._own) >= MOST_FUNCTIONS:
                return False
            told = self._own[function] = {}
        told.pop(caller, None)
        told[caller] = terms
        self._update(function)
        return True

    def told_by(self, caller: str) -> list[str]:
        """The functions whose terms this caller told."""
        return [function for function, told in self._own.items() if caller in told]

    def forget(self, caller: str) -> None:
        """Forget what this caller told."""
        for function in self.told_by(caller):
            self._forget(function, self._own[function], caller)

    def count_refusal(self, owner: str, quota: str) -> None:
        """A request was refused by this quota."""
        if owner in self._in_force:
            self.refused.setdefault(owner, Counter())[quota] += 1

    @property
    def of_operators(self) -> Mapping[str, OwnerTerms]:
        """What operators set, by owner."""
        return self._of_operators

    def get(self, owner: str) -> TermsInForce | None:
        """The terms in force of an owner; None if it has none."""
        terms = self._in_force.get(owner)
        if terms is None:
            return None
        return TermsInForce(terms, OPERATOR if owner in self._of_operators else FUNCTION)

    def __iter__(self) -> Iterator[str]:
        """Every owner that has terms, in the order of their names."""
        return iter(sorted(self._in_force))

    def __len__(self) -> int:
        return len(self._in_force)

    def _forget(self, function: str, told: dict[str, OwnerTerms], caller: str) -> None:
        told.pop(caller, None)
        if not told:
            del self._own[function]
        self._update(function)

    def _update(self, owner: str) -> None:
        """Tell the core if other terms are in force now."""
        terms = self._of_operators.get(owner)
        if terms is None and owner in self._own:
            terms = next(reversed(self._own[owner].values()))
        if terms == self._in_force.get(owner):
            return
        if terms is None:
            del self._in_force[owner]
            self.refused.pop(owner, None)
        else:
            self._in_force[owner] = terms
        self._apply(owner, terms)
