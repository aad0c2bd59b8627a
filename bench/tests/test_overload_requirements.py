"""What must hold under overload: each requirement is seen to be met, and to be missed."""

from dataclasses import replace

import pytest

from bench.overload.offered_loads import CallKind, KindFigures, OfferedLoad
from bench.overload.overload_requirements import fair_counts, judged

ONE = (CallKind("f", "/f"),)
TWO = (CallKind("light", "/l"), CallKind("heavy", "/h", weight=3.0))
MOST, BOUND_S = 100.0, 5.0


def of_kind(name: str = "f", offered: int = 100, answered: int = 100) -> KindFigures:
    return KindFigures(name, offered, answered, offered - answered, 1.0, 2.0, 3.0)


def a_load(factor: float, *kinds: KindFigures) -> OfferedLoad:
    found = kinds or (of_kind(),)
    answered = sum(each.answered for each in found)
    refused = sum(each.refused for each in found)
    return OfferedLoad(
        factor,
        MOST * factor,
        answered,
        refused,
        {},
        1.0,
        1.5,
        2.0,
        5.0,
        0.01,
        0,
        0.0,
        0.1,
        9,
        found,
    )


def missed(loads: list[OfferedLoad], kinds: tuple[CallKind, ...] = ONE) -> list[str]:
    return [
        f"{each.text}: {each.found}" for each in judged(kinds, loads, MOST, BOUND_S) if not each.met
    ]


def test_everything_holds_when_what_is_too_much_is_refused() -> None:
    loads = [a_load(0.8, of_kind(offered=80, answered=80)), a_load(4, of_kind(offered=400))]

    assert missed(loads) == []


def test_early_refusal_is_found_unless_a_quota_wants_it() -> None:
    load = a_load(0.8, of_kind(offered=80, answered=79))

    assert missed([load, a_load(4)]) == ["nothing is refused up to 0.8 of the capacity: 1 refused"]
    assert missed([load, a_load(4)], (CallKind("f", "/f", limited=True),)) == []


def test_who_starves_is_named() -> None:
    load = a_load(4, of_kind("light", 200, 10), of_kind("heavy", 200, 90))

    (found,) = missed([load], TWO)

    assert found.endswith("least 0.40 (light at 4)")
    assert missed([a_load(4, of_kind("light", 200, 25), of_kind("heavy", 200, 75))], TWO) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"others": {"502": 2}}, "every call is answered 200, 429 or 503: 2 others (502)"),
        ({"hopeless": 3}, "every refusal has a Retry-After: 3 have none"),
        ({"refusal_s": 0.7}, "99 of 100 refusals within 0.5 s: 0.700 s (at 4)"),
        ({"answered": 80.0}, "at 4 times the capacity at least 0.9 of it is answered: 0.80"),
    ],
)
def test_requirement_is_missed_when_a_load_shows_it(change: dict[str, object], text: str) -> None:
    loads = [a_load(1), replace(a_load(4), **change)]  # type: ignore[arg-type]  # a test's own fields

    assert missed(loads) == [text]


def test_waits_beyond_the_bound_are_found() -> None:
    slow = replace(of_kind(), p99_s=5.6, longest_s=7.6)

    first, second = missed([a_load(4, slow)])

    assert first.endswith("5.60 s (f at 4)")
    assert second.endswith("7.60 s (f at 4)")


def test_fair_part_is_by_weight_and_what_one_does_not_ask_for_is_the_others() -> None:
    assert fair_counts(100, [400, 400], [1.0, 3.0]) == [25.0, 75.0]
    assert fair_counts(100, [400, 60], [1.0, 3.0]) == [40.0, 60.0]
    assert fair_counts(100, [10, 400, 400], [1.0, 1.0, 1.0]) == [10.0, 45.0, 45.0]
    assert fair_counts(100, [30, 40], [1.0, 1.0]) == [30.0, 40.0]
    assert fair_counts(0, [30, 40], [1.0, 1.0]) == [0.0, 0.0]
