"""A path that transfers share: when each ends."""

import pytest

from research.sage.fair_link import FairLink


def ends(link: FairLink[str]) -> list[tuple[str, float]]:
    found = []
    while len(link):
        at_s = link.ends_s
        found.append((link.take(at_s), at_s))
    return found


def test_work_takes_its_own_time_when_it_is_alone() -> None:
    link: FairLink[str] = FairLink()
    link.add(2.0, "a", now=1.0)

    assert ends(link) == [("a", 3.0)]


def test_two_transfers_take_twice_as_long_while_both_go_on() -> None:
    link: FairLink[str] = FairLink()
    link.add(1.0, "short", now=0.0)
    link.add(2.0, "long", now=0.0)

    assert ends(link) == [("short", 2.0), ("long", 3.0)]


def test_a_later_transfer_slows_only_what_is_left_of_the_earlier() -> None:
    link: FairLink[str] = FairLink()
    link.add(2.0, "first", now=0.0)
    link.add(2.0, "second", now=1.0)

    assert ends(link) == [("first", 3.0), ("second", 4.0)]


def test_contention_makes_two_together_slower_than_one_after_the_other() -> None:
    link: FairLink[str] = FairLink(contention=0.5)
    link.add(1.0, "a", now=0.0)
    link.add(1.0, "b", now=0.0)

    assert [at_s for _, at_s in ends(link)] == pytest.approx([3.0, 3.0])


def test_an_idle_path_forgets_how_long_it_was_idle() -> None:
    link: FairLink[str] = FairLink()
    link.add(1.0, "a", now=0.0)
    link.take(link.ends_s)
    link.add(1.0, "b", now=100.0)

    assert link.ends_s == 101.0
