"""Leases that nodes may report later: what is remembered of their releases, and of which."""

import pytest

from cache_manager.model.ids import ModelId
from scheduler.core.handover import Handover
from scheduler.model.events import LiveLease
from scheduler.model.values import LeaseId, RequestId, SlotId

FIRST = 1000
OURS, EARLIER = LeaseId(FIRST + 7), LeaseId(FIRST - 7)
R0, R1 = RequestId("r0"), RequestId("r1")
MANY = 5000


def found(lease: LeaseId, *requests: RequestId) -> LiveLease:
    """A node's report that the lease is in force."""
    return LiveLease(lease, SlotId("g0"), (ModelId("bert"),), requests)


def test_release_of_an_earlier_leaders_lease_counts_when_its_node_reports_it() -> None:
    handover = Handover(FIRST)
    handover.release(EARLIER, R0)
    assert handover.left(found(EARLIER, R0, R1)) == (R1,)
    handover.release(EARLIER, R1)
    assert handover.left(found(EARLIER, R0, R1)) is None


def test_release_counts_when_the_lease_is_of_a_later_term_than_this_leader_began_in() -> None:
    """A store that has lost its data begins at an old term, and learns newer ones from others."""
    handover = Handover(FIRST)
    later = LeaseId(5 * FIRST)
    handover.ids_raised(6 * FIRST)
    handover.release(later, R0)
    assert handover.left(found(later, R0)) is None


def test_release_of_a_lease_that_was_cut_off_counts_when_its_node_is_back() -> None:
    handover = Handover(FIRST)
    handover.cut_off(OURS, released=False)
    assert handover.left(found(OURS, R0)) == (R0,)
    handover.release(OURS)
    assert handover.left(found(OURS, R0)) is None


def test_lease_that_was_released_before_it_was_cut_off_is_over_when_its_node_is_back() -> None:
    handover = Handover(FIRST)
    handover.cut_off(OURS, released=True)
    assert handover.left(found(OURS, R0)) is None


def test_who_released_a_lease_before_it_was_cut_off_is_not_forgotten() -> None:
    handover = Handover(FIRST)
    handover.release(EARLIER, R0)
    handover.cut_off(EARLIER, released=False)
    assert handover.left(found(EARLIER, R0, R1)) == (R1,)


@pytest.mark.parametrize("requests", [(), (R0,)])
def test_lease_that_was_cut_off_has_all_its_requests_when_none_has_released_it(
    requests: tuple[RequestId, ...],
) -> None:
    handover = Handover(FIRST)
    handover.cut_off(OURS, released=False)
    assert handover.left(found(OURS, *requests)) == requests


def test_releases_of_leases_that_ended_by_their_nodes_word_push_out_no_others() -> None:
    """They are the rule, at every call; what a lost node may report is rare, and counts."""
    handover = Handover(FIRST)
    handover.release(EARLIER)
    handover.cut_off(OURS, released=False)
    for number in range(MANY):
        handover.release(LeaseId(FIRST + 100 + number), R1)
    handover.release(OURS, R0)
    assert handover.left(found(EARLIER, R0)) is None
    assert handover.left(found(OURS, R0)) is None
    assert handover.left(found(LeaseId(FIRST + 100), R1)) == (R1,), "nothing is known of it"


def test_what_was_cut_off_first_is_forgotten_when_very_many_were() -> None:
    handover = Handover(FIRST)
    for number in range(MANY):
        handover.cut_off(LeaseId(FIRST + number), released=True)
    assert handover.left(found(LeaseId(FIRST), R0)) == (R0,)
    assert handover.left(found(LeaseId(FIRST + MANY - 1), R0)) is None
