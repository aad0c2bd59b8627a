"""Leases that linger: when they end, and that nobody loses one before a first call."""

import pytest

from gpu_manager.node.leases import (
    EndReason,
    LeaseInForce,
    LeasesInForce,
    LeaseTimes,
    SessionClaim,
    SessionKey,
)
from scheduler.api import GpuId, LeaseId, ModelId, RequestId, SlotId

TIMES = LeaseTimes(linger_s=5.0, quantum_s=0.1, quiet_s=0.02, first_call_s=2.0, expiry_s=300.0)
HOLDER = SessionKey("s")
BERT = ModelId("t/bert")


def granted(leases: LeasesInForce, number: int = 1, gpu: str = "g0") -> LeaseInForce:
    assert leases.grant(LeaseInForce(LeaseId(number), SlotId(gpu), GpuId(gpu), (BERT,)))
    held = leases.get(LeaseId(number))
    assert held is not None
    return held


def sole(held: LeaseInForce) -> SessionClaim:
    """What the one session has that holds it."""
    (claim,) = held.claims.values()
    return claim


def claimed(leases: LeasesInForce, number: int = 1, at_s: float = 0.0) -> LeaseInForce:
    held = granted(leases, number)
    leases.claim(held, HOLDER, at_s)
    return held


def due(leases: LeasesInForce, now_s: float) -> list[EndReason]:
    return [why for _, why in leases.due(now_s)]


def test_grant_changes_nothing_when_it_is_said_again() -> None:
    leases = LeasesInForce(TIMES)
    held = claimed(leases)

    assert not leases.grant(LeaseInForce(held.id, held.slot, held.gpu, ()))
    assert leases.get(held.id) is held
    assert held.holders == {HOLDER}


def test_lease_does_not_linger_when_nobody_was_told_of_it() -> None:
    leases = LeasesInForce(TIMES, contended=True)
    granted(leases)

    assert leases.next_due_s() is None
    assert due(leases, 1e9) == []


def test_lease_ends_when_it_was_idle_for_long() -> None:
    leases = LeasesInForce(TIMES)
    held = claimed(leases)
    leases.record_use(held, 3.0, 0.01)

    assert leases.next_due_s() == 8.0
    assert due(leases, 7.9) == []
    assert due(leases, 8.0) == [EndReason.IDLE]


def test_lease_ends_when_it_was_held_for_too_long() -> None:
    leases = LeasesInForce(TIMES)
    held = claimed(leases)
    leases.record_use(held, 299.0, 0.01)

    assert due(leases, 299.9) == []
    assert due(leases, 300.0) == [EndReason.EXPIRED]


@pytest.mark.parametrize(
    ("used_s", "run_s", "ends_s", "why"),
    [
        (0.01, 0.0, 0.03, EndReason.QUIET),
        (0.01, 0.01, 0.045, EndReason.QUIET),
        (0.09, 0.0, 0.1, EndReason.CONTENDED),
        (0.05, 0.05, 0.1, EndReason.CONTENDED),
    ],
)
def test_lease_ends_when_others_wait_and_it_is_quiet_or_had_its_time(
    used_s: float, run_s: float, ends_s: float, why: EndReason
) -> None:
    leases = LeasesInForce(TIMES)
    leases.record_use(claimed(leases), used_s, run_s)
    assert due(leases, ends_s + 1e-9) == []

    leases.contended = True

    assert leases.next_due_s() == pytest.approx(ends_s)
    assert due(leases, ends_s - 0.001) == []
    assert due(leases, ends_s + 1e-9) == [why]


def test_lease_has_time_for_its_first_call_when_others_wait() -> None:
    leases = LeasesInForce(TIMES, contended=True)
    held = claimed(leases, at_s=10.0)

    assert due(leases, 10.03) == [
        EndReason.QUIET
    ]  # perhaps it made one, and it was not reported yet
    sole(held).checked_s = 11.95
    assert due(leases, 11.99) == []
    assert due(leases, 12.0) == [EndReason.CONTENDED]


def test_lease_that_is_new_is_checked_less_and_less_often_when_others_wait() -> None:
    leases = LeasesInForce(TIMES, contended=True)
    held = claimed(leases)
    checks = []
    while (at_s := leases.next_due_s() or 0.0) < 0.5:
        checks.append(round(at_s, 6))
        sole(held).checked_s = at_s

    assert checks == [0.02, 0.04, 0.08, 0.16, 0.26, 0.36, 0.46]


def test_lease_is_not_due_when_it_is_being_checked() -> None:
    leases = LeasesInForce(TIMES, contended=True)
    claimed(leases).checking = True

    assert due(leases, 1e9) == []
    assert leases.next_due_s() is None


def test_lease_is_not_due_again_when_it_ends_already() -> None:
    leases = LeasesInForce(TIMES)
    claimed(leases).ending = EndReason.RELEASED

    assert due(leases, 1e9) == []
    assert leases.next_due_s() is None


def test_leases_are_found_by_holder_and_by_model_on_one_gpu() -> None:
    leases = LeasesInForce(TIMES)
    mine = claimed(leases, 1)
    elsewhere = granted(leases, 2, gpu="g1")

    assert leases.held_by(HOLDER) == [mine]
    assert leases.using(GpuId("g1"), BERT) == [elsewhere]
    assert leases.using(GpuId("g0"), ModelId("t/other")) == []
    leases.forget(mine.id)
    assert leases.get(mine.id) is None
    assert list(leases) == [elsewhere]


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

    assert (TIMES.grace(why) > 2.0) == wanted


def unclaimed(
    leases: LeasesInForce,
    number: int = 1,
    *,
    loaded_s: float | None = 0.0,
    own: bool = False,
    function: str = "",
) -> LeaseInForce:
    slot, gpu = SlotId("g0"), GpuId("g0")
    lease = LeaseInForce(LeaseId(number), slot, gpu, (BERT,), granted_s=0.0, own=own)
    assert leases.grant(lease)
    lease.loaded_s, lease.function = loaded_s, function
    return lease


def test_unclaimed_lease_ends_soon_when_others_wait() -> None:
    leases = LeasesInForce(TIMES, contended=True)
    unclaimed(leases, loaded_s=10.0)

    assert due(leases, 10.9) == []
    assert due(leases, 11.0) == [EndReason.UNCLAIMED]


@pytest.mark.parametrize(("lacking_s", "ends_s"), [(10.0, 11.0), (-5.0, 1.0)])
def test_unclaimed_lease_ends_soon_without_weights_that_somebody_sends(
    lacking_s: float, ends_s: float
) -> None:
    leases = LeasesInForce(TIMES, contended=True)
    held = unclaimed(leases, loaded_s=None)
    held.lacking_s = lacking_s

    assert due(leases, ends_s - 0.1) == []
    assert due(leases, ends_s) == [EndReason.UNCLAIMED]
    sole(held).awaited = True
    assert due(leases, ends_s) == []


def test_function_that_claims_none_of_its_leases_has_less_time_for_each() -> None:
    leases = LeasesInForce(TIMES, contended=True)
    for number, ends_s in enumerate((1.0, 0.5, 0.25, 0.125, 0.0625, 0.0625), start=1):
        held = unclaimed(leases, number, function="f")
        assert due(leases, ends_s - 0.01) == []
        assert due(leases, ends_s) == [EndReason.UNCLAIMED]
        leases.note_unclaimed(held, ends_s)
        leases.forget(held.id)
    other = unclaimed(leases, 7, function="g")
    assert due(leases, 0.9) == []
    leases.forget(other.id)

    held = unclaimed(leases, 8, function="f")
    leases.claim(held, SessionKey("s"), 0.01)
    assert leases.patience.of("f", 1.0) == 0.0625, "a session's own lease says nothing"
    leases.claim(held, SessionKey("s"), 0.01, given=True)
    assert leases.patience.of("f", 1.0) == 0.125


def test_lease_that_ends_where_nobody_waits_costs_its_function_no_time() -> None:
    leases = LeasesInForce(TIMES)
    leases.note_unclaimed(unclaimed(leases, function="f"), 120.0)
    assert leases.patience.of("f", 1.0) == 1.0


def test_unclaimed_lease_of_a_caller_stays_when_nobody_waits() -> None:
    leases = LeasesInForce(TIMES)
    unclaimed(leases)

    assert due(leases, 119.0) == []
    assert due(leases, 120.0) == [EndReason.UNCLAIMED]


@pytest.mark.parametrize("loaded_s", [10.0, None])
def test_unclaimed_lease_that_a_session_asked_for_ends_as_an_idle_one(
    loaded_s: float | None,
) -> None:
    """Its quota counts it until then, and nobody waits who is refused for it."""
    leases = LeasesInForce(TIMES)
    held = unclaimed(leases, loaded_s=loaded_s, own=True)
    assert due(leases, 119.0) == ([] if loaded_s is None else [EndReason.UNCLAIMED])
    held.lacking_s = 10.0

    assert due(leases, 10.0 + TIMES.linger_s - 0.1) == []
    assert due(leases, 10.0 + TIMES.linger_s) == [EndReason.UNCLAIMED]
    sole(held).awaited = True
    assert due(leases, 119.0) == []


def test_unclaimed_lease_stays_while_its_models_load_or_a_session_waits_for_it() -> None:
    leases = LeasesInForce(TIMES, contended=True)
    held = unclaimed(leases, loaded_s=None)
    assert due(leases, 119.0) == []

    held.loaded_s, sole(held).awaited = 20.0, True
    assert due(leases, 119.0) == []


@pytest.mark.parametrize(
    ("stands_s", "ends_s", "why"),
    [
        (0.0, 1.02, EndReason.QUIET),
        (3.0, 3.25, EndReason.QUIET),
        (9.0, 6.0, EndReason.IDLE),
    ],
)
def test_lease_that_stands_is_not_ended_by_those_who_wait_while_it_does(
    stands_s: float, ends_s: float, why: EndReason
) -> None:
    leases = LeasesInForce(TIMES, contended=True)
    lease = LeaseInForce(LeaseId(1), SlotId("g0"), GpuId("g0"), (BERT,), 0.0, stands_s=stands_s)
    assert leases.grant(lease)
    held = leases.get(LeaseId(1))
    assert held is not None
    leases.claim(held, HOLDER, 0.97, given=True)
    leases.record_use(held, 1.0, 0.0)

    assert leases.next_due_s() == pytest.approx(ends_s)
    assert due(leases, ends_s - 0.001) == []
    assert due(leases, ends_s + 1e-9) == [why]


# -- leases that several requests share -----------------------------------------------------------

ONE, TWO = RequestId("r1"), RequestId("r2")
OTHER = SessionKey("other")


def divided(leases: LeasesInForce, at_s: float = 0.0) -> LeaseInForce:
    """A lease of two requests, which two sessions have claimed."""
    held = LeaseInForce(LeaseId(1), SlotId("g0"), GpuId("g0"), (BERT,), at_s, (ONE, TWO))
    assert leases.grant(held)
    leases.claim(held, HOLDER, at_s, ONE, given=True)
    leases.claim(held, OTHER, at_s, TWO, given=True)
    return held


def test_silent_session_does_not_end_a_lease_that_another_one_uses() -> None:
    leases = LeasesInForce(TIMES)
    held = divided(leases)
    for at_s in range(1, 10):
        leases.record_use(held, float(at_s), 0.01, OTHER)
    assert leases.due(9.5) == []
    assert leases.next_due_s() == 9.0 + TIMES.linger_s


def test_silent_session_does_not_keep_a_lease_that_the_other_one_gave_back() -> None:
    leases = LeasesInForce(TIMES)
    held = divided(leases)
    leases.record_use(held, 20.0, 0.01, OTHER)
    assert held.drop(TWO)
    assert leases.due(20.0) == [(held, EndReason.IDLE)]
    assert (held.requests, held.holders) == ((ONE,), {HOLDER})
    assert not held.drop(ONE)


def test_divided_lease_ends_for_others_when_its_last_session_has_had_its_time() -> None:
    leases = LeasesInForce(TIMES, contended=True)
    held = divided(leases)
    leases.record_use(held, 0.01, 0.001, HOLDER)
    assert leases.due(1.0) == [(held, EndReason.QUIET)]  # to be checked: one has not called yet
    for claim in held.claims.values():
        claim.checked_s = 1.0
    assert leases.is_due(held, 1.0) is None
    assert leases.is_due(held, TIMES.first_call_s) is not None


def test_unclaimed_request_of_a_divided_lease_has_its_own_time_to_be_claimed() -> None:
    leases = LeasesInForce(TIMES, contended=True)
    held = LeaseInForce(LeaseId(1), SlotId("g0"), GpuId("g0"), (BERT,), 0.0, (ONE, TWO))
    assert leases.grant(held)
    held.loaded_s = 1.0
    leases.claim(held, HOLDER, 1.0, ONE)
    leases.record_use(held, 1.01, 0.001, HOLDER)
    assert leases.next_due_s() == 1.0 + TIMES.claim_s
    assert leases.due(1.0 + TIMES.claim_s) == [(held, EndReason.UNCLAIMED)]


def test_only_the_session_of_its_request_has_a_part_of_a_divided_lease() -> None:
    held = divided(LeasesInForce(TIMES))
    assert held.is_free_for(HOLDER, ONE)
    assert not held.is_free_for(OTHER, ONE)
    assert not held.is_free_for(HOLDER, RequestId("r3"))
    assert held.claims_of(OTHER).keys() == {TWO}
