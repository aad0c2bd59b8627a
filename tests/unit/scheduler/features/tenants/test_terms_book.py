"""Which terms are in force: an operator's, else the last that a caller told of a function."""

import math
from typing import Any

import pytest

from scheduler.features.tenants import quotas
from scheduler.features.tenants.quotas import FUNCTION, OPERATOR, TermsBook, TermsInForce
from scheduler.model.errors import BadValue
from scheduler.model.owner_terms import RANGES, OwnerTerms, check_owner, check_terms, is_function

F = "team/f"
ONE, TWO, THREE = (OwnerTerms(leases=number) for number in (1, 2, 3))


class Told:
    """What the core was told, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, OwnerTerms | None]] = []

    def __call__(self, owner: str, terms: OwnerTerms | None) -> None:
        self.all.append((owner, terms))


def a_book(**of_operators: OwnerTerms) -> tuple[TermsBook, Told]:
    told = Told()
    book = TermsBook(told)
    for owner, set_terms in of_operators.items():
        book.set(owner, set_terms)
    return book, told


def test_core_is_told_at_the_beginning_what_operators_set() -> None:
    book, told = a_book(team=ONE)
    assert told.all == [("team", ONE)]
    assert book.get("team") == TermsInForce(ONE, OPERATOR)
    assert book.get("other") is None


def test_operator_wins_over_the_function_as_long_as_the_operators_terms_stay() -> None:
    book, told = a_book()
    book.tell("g1", F, TWO)
    assert book.get(F) == TermsInForce(TWO, FUNCTION)
    book.set(F, ONE)
    book.tell("g1", F, THREE)
    assert book.get(F) == TermsInForce(ONE, OPERATOR)
    book.set(F, None)
    assert book.get(F) == TermsInForce(THREE, FUNCTION)
    book.tell("g1", F, None)
    assert book.get(F) is None
    assert told.all == [(F, TWO), (F, ONE), (F, THREE), (F, None)]
    assert not len(book)


def test_last_caller_decides_and_its_terms_go_with_it() -> None:
    book, told = a_book()
    book.tell("g1", F, ONE)
    book.tell("g2", F, TWO)
    book.tell("g1", F, ONE)
    assert book.get(F) == TermsInForce(ONE, FUNCTION)
    book.tell("g1", F, None)
    assert book.get(F) == TermsInForce(TWO, FUNCTION)
    book.tell("g2", F, None)
    assert [terms for _, terms in told.all] == [ONE, TWO, ONE, TWO, None]


def test_core_is_told_nothing_when_the_same_is_told_again() -> None:
    book, told = a_book()
    for caller in ("g1", "g1", "g2"):
        book.tell(caller, F, ONE)
    book.tell("g3", F, None)
    assert told.all == [(F, ONE)]


def test_further_functions_are_left_out_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "MOST_FUNCTIONS", 1)
    book, _ = a_book()
    book.tell("g", F, ONE)
    book.tell("g", "team/second", ONE)
    book.tell("g", F, TWO)
    assert list(book) == [F]
    book.tell("g", F, None)
    book.tell("g", "team/second", ONE)
    assert list(book) == ["team/second"]


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "owner",
    [
        "",
        "/",
        "a/",
        "/a",
        "a/b/c",
        "a\n",
        513 * "a",
        "../x",
        "..",
        "a/..",
        "a/.b",
        "a b",
        "ä",
        "-a",
    ],
)
def test_owner_is_refused_when_it_is_neither_a_namespace_nor_a_function(owner: str) -> None:
    with pytest.raises(BadValue, match="NAMESPACE/FUNCTION"):
        check_owner(owner)


def test_owner_is_a_namespace_or_a_function() -> None:
    assert not is_function(check_owner("team"))
    assert is_function(check_owner(F))


def with_number(field: str, value: float) -> OwnerTerms:
    number: Any = value
    return OwnerTerms(**{field: number})


@pytest.mark.parametrize("field", RANGES)
def test_terms_are_refused_when_a_number_is_out_of_bounds(field: str) -> None:
    least, most = RANGES[field]
    check_terms(with_number(field, least))
    check_terms(with_number(field, most))
    for wrong in (least - 1, most + 1, math.nan, math.inf, 10**400):
        with pytest.raises(BadValue, match=field):
            check_terms(with_number(field, wrong))
