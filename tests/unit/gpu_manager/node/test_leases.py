"""Leases that linger: when they end, and that nobody loses one before a first call."""

import math

import pytest

from gpu_manager.node.leases import EndReason, Lease, LeaseTimes, SessionClaim, SessionKey
from scheduler.api import GpuId, LeaseId, LiveLease, ModelId, RequestId, SlotId

TIMES = LeaseTimes(linger_s=5.0, quantum_s=0.1, quiet_s=0.02, first_call_s=2.0, expiry_s=300.0)
HOLDER = SessionKey("s")
BERT = ModelId("t/bert")


def lease(
    granted_s: float = math.inf,
    *requests: RequestId,
    own: bool = False,
    stands_s: float = 0.0,
    loaded_s: float | None = None,
) -> Lease:
    live = LiveLease(LeaseId(1), SlotId("g0"), (BERT,), requests, own=own)
    found = Lease(live, GpuId("g0"), granted_s, stands_s=stands_s)
    found.loaded_s = loaded_s
    return found


def sole(held: Lease) -> SessionClaim:
    """What the one session has that holds it."""
    (claim,) = held.claims.values()
    return claim


def take(
    held: Lease, at_s: float, session: SessionKey = HOLDER, request: RequestId | None = None
) -> None:
    """A session claims its part."""
    claim = held.claim_of(request)
    assert claim is not None
    claim.holder = session
    claim.claimed_s = claim.used_s = claim.checked_s = at_s


def claimed(at_s: float = 0.0) -> Lease:
    held = lease()
    take(held, at_s)
    return held


def ends(held: Lease, *, contended: bool = False) -> tuple[float, EndReason] | None:
    at_s, why = held.end_by_itself(TIMES, TIMES.claim_s, contended=contended)
    return None if at_s == math.inf else (at_s, why)


def ends_s(held: Lease, *, contended: bool = False) -> float | None:
    found = ends(held, contended=contended)
    return None if found is None else found[0]


def test_lease_does_not_linger_when_nobody_was_told_of_it() -> None:
    assert ends(lease(), contended=True) is None


def test_lease_ends_when_it_was_idle_for_long() -> None:
    held = claimed()
    held.note_use(3.0, 0.01)
    assert ends(held) == (8.0, EndReason.IDLE)


def test_lease_ends_when_it_was_held_for_too_long() -> None:
    held = claimed()
    held.note_use(299.0, 0.01)
    assert ends(held) == (300.0, EndReason.EXPIRED)


@pytest.mark.parametrize(
    ("used_s", "run_s", "at_s", "why"),
    [
        (0.01, 0.0, 0.03, EndReason.QUIET),
        (0.01, 0.01, 0.045, EndReason.QUIET),
        (0.09, 0.0, 0.1, EndReason.CONTENDED),
        (0.05, 0.05, 0.1, EndReason.CONTENDED),
    ],
)
def test_lease_ends_when_others_wait_and_it_is_quiet_or_had_its_time(
    used_s: float, run_s: float, at_s: float, why: EndReason
) -> None:
    held = claimed()
    held.note_use(used_s, run_s)
    assert ends(held) == (used_s + TIMES.linger_s, EndReason.IDLE)
    end = ends(held, contended=True)
    assert end is not None
    assert end[0] == pytest.approx(at_s)
    assert end[1] is why


def test_lease_has_time_for_its_first_call_when_others_wait() -> None:
    held = claimed(at_s=10.0)
    # Perhaps it made one, and it was not reported yet.
    assert ends(held, contended=True) == (10.02, EndReason.QUIET)
    sole(held).checked_s = 11.95
    assert ends(held, contended=True) == (12.0, EndReason.CONTENDED)


def test_lease_that_is_new_is_checked_less_and_less_often_when_others_wait() -> None:
    held = claimed()
    checks = []
    while (at_s := ends_s(held, contended=True) or 0.0) < 0.5:
        checks.append(round(at_s, 6))
        sole(held).checked_s = at_s

    assert checks == [0.02, 0.04, 0.08, 0.16, 0.26, 0.36, 0.46]


def test_lease_is_not_due_when_it_is_being_checked() -> None:
    held = claimed()
    held.checking = True
    assert ends(held, contended=True) is None


def test_lease_is_not_due_again_when_it_ends_already() -> None:
    held = claimed()
    held.ending = EndReason.RELEASED
    assert ends(held) is None


@pytest.mark.parametrize("why", list(EndReason))
def test_last_call_is_cut_short_only_when_nobody_wants_its_answer(why: EndReason) -> None:
    wanted = why in (
        EndReason.IDLE,
        EndReason.CONTENDED,
        EndReason.QUIET,
        EndReason.EXPIRED,
        EndReason.RECALLED,
        EndReason.UNCLAIMED,
        EndReason.WORKER_LOST,
    )

    assert (lease().grace_s(TIMES, why) > 2.0) == wanted


def test_unclaimed_lease_ends_soon_when_others_wait() -> None:
    assert ends(lease(0.0, loaded_s=10.0), contended=True) == (11.0, EndReason.UNCLAIMED)


@pytest.mark.parametrize(("lacking_s", "at_s"), [(10.0, 11.0), (-5.0, 1.0)])
def test_unclaimed_lease_ends_soon_without_weights_that_somebody_sends(
    lacking_s: float, at_s: float
) -> None:
    held = lease(0.0)
    held.lacking_s = lacking_s
    assert ends(held, contended=True) == (at_s, EndReason.UNCLAIMED)
    sole(held).awaited = True
    assert ends_s(held, contended=True) == TIMES.unclaimed_s


def test_unclaimed_lease_of_a_caller_stays_when_nobody_waits() -> None:
    assert ends(lease(0.0, loaded_s=0.0)) == (120.0, EndReason.UNCLAIMED)


@pytest.mark.parametrize("loaded_s", [10.0, None])
def test_unclaimed_lease_that_a_session_asked_for_ends_as_an_idle_one(
    loaded_s: float | None,
) -> None:
    """Its quota counts it until then, and nobody waits who is refused for it."""
    held = lease(0.0, own=True, loaded_s=loaded_s)
    assert ends_s(held) == (120.0 if loaded_s is None else 10.0 + TIMES.linger_s)
    held.lacking_s = 10.0
    assert ends(held) == (10.0 + TIMES.linger_s, EndReason.UNCLAIMED)
    sole(held).awaited = True
    assert ends_s(held) == 120.0


def test_unclaimed_lease_stays_while_its_models_load_or_a_session_waits_for_it() -> None:
    held = lease(0.0)
    assert ends_s(held, contended=True) == 120.0

    held.loaded_s, sole(held).awaited = 20.0, True
    assert ends_s(held, contended=True) == 120.0


@pytest.mark.parametrize(
    ("stands_s", "at_s", "why"),
    [
        (0.0, 1.02, EndReason.QUIET),
        (3.0, 3.25, EndReason.QUIET),
        (9.0, 6.0, EndReason.IDLE),
    ],
)
def test_lease_that_stands_is_not_ended_by_those_who_wait_while_it_does(
    stands_s: float, at_s: float, why: EndReason
) -> None:
    held = lease(0.0, stands_s=stands_s)
    take(held, 0.97)
    held.note_use(1.0, 0.0)
    end = ends(held, contended=True)
    assert end is not None
    assert end[0] == pytest.approx(at_s)
    assert end[1] is why


# -- leases that several requests share -----------------------------------------------------------

ONE, TWO = RequestId("r1"), RequestId("r2")
OTHER = SessionKey("other")


def divided() -> Lease:
    """A lease of two requests, which two sessions have claimed."""
    held = lease(0.0, ONE, TWO)
    take(held, 0.0, HOLDER, ONE)
    take(held, 0.0, OTHER, TWO)
    return held


def test_silent_session_does_not_end_a_lease_that_another_one_uses() -> None:
    held = divided()
    for at_s in range(1, 10):
        held.note_use(float(at_s), 0.01, OTHER)
    assert ends(held) == (9.0 + TIMES.linger_s, EndReason.IDLE)


def test_silent_session_does_not_keep_a_lease_that_the_other_one_gave_back() -> None:
    held = divided()
    held.note_use(20.0, 0.01, OTHER)
    del held.claims[TWO]
    assert ends(held) == (TIMES.linger_s, EndReason.IDLE)
    assert (held.report().requests, held.holders) == ((ONE,), {HOLDER})


def test_divided_lease_ends_for_others_when_its_last_session_has_had_its_time() -> None:
    held = divided()
    held.note_use(0.01, 0.001, HOLDER)
    end = ends(held, contended=True)
    assert end is not None
    assert end[1] is EndReason.QUIET, "to be checked: one has not called yet"
    for claim in held.claims.values():
        claim.checked_s = 1.0
    assert 1.0 < (ends_s(held, contended=True) or 0.0) <= TIMES.first_call_s


def test_unclaimed_request_of_a_divided_lease_has_its_own_time_to_be_claimed() -> None:
    held = lease(0.0, ONE, TWO, loaded_s=1.0)
    take(held, 1.0, HOLDER, ONE)
    held.note_use(1.01, 0.001, HOLDER)
    assert ends(held, contended=True) == (1.0 + TIMES.claim_s, EndReason.UNCLAIMED)


def test_only_the_session_of_its_request_has_a_part_of_a_divided_lease() -> None:
    held = divided()
    assert held.free_claim(HOLDER, ONE) is held.claim_of(ONE)
    assert held.free_claim(OTHER, ONE) is None
    assert held.free_claim(HOLDER, RequestId("r3")) is None
    assert held.claims_of(OTHER).keys() == {TWO}
