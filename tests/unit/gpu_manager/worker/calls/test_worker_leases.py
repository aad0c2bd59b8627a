"""The gate in a worker: no call without a lease, and an end that comes after the last call."""

import threading

import pytest

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases, LeaseClocks
from gpu_manager.worker.orders import Admission


def nobody(*_: object) -> None:
    """Nobody is told."""


def test_call_enters_when_the_order_that_admits_it_comes_after_it() -> None:
    leases = AdmittedLeases(nobody, nobody, LeaseClocks(), patience_s=10.0)
    entering = threading.Thread(target=leases.enter, args=(1, "s", "f"))
    entering.start()
    leases.admit(Admission(2, "s"))
    assert entering.is_alive()
    leases.admit(Admission(1, "s"))
    entering.join()
    assert not entering.is_alive()


def test_call_is_refused_at_once_when_its_lease_has_ended() -> None:
    leases = AdmittedLeases(nobody, nobody, LeaseClocks(), patience_s=1000.0)
    leases.admit(Admission(1, "s"))
    leases.end(1)
    with pytest.raises(CallRefused) as refused:
        leases.enter(1, "s", "f")
    assert refused.value.failure == "lease not in force"


def test_call_is_refused_at_once_when_its_lease_is_another_sessions() -> None:
    ended: list[int] = []
    leases = AdmittedLeases(ended.append, nobody, LeaseClocks(), patience_s=1000.0)
    leases.admit(Admission(1, "team/f/mine"))
    with pytest.raises(CallRefused, match="another session"):
        leases.enter(1, "team/f/neighbours", "team/f")
    leases.enter(1, "team/f/mine", "team/f")
    leases.end(1)
    leases.leave(1)
    assert ended == [1]


def test_call_is_refused_when_its_lease_never_comes() -> None:
    with pytest.raises(CallRefused):
        AdmittedLeases(nobody, nobody, LeaseClocks(), patience_s=0.0).enter(1, "s", "f")


def test_end_is_told_after_the_last_call_when_several_are_under_way() -> None:
    ended: list[int] = []
    leases = AdmittedLeases(ended.append, nobody, LeaseClocks())
    leases.admit(Admission(1, "s"))
    leases.enter(1, "s", "f")
    leases.enter(1, "s", "f")
    leases.end(1)
    with pytest.raises(CallRefused):
        leases.in_force(1)
    leases.leave(1)
    assert ended == []
    leases.leave(1)
    assert ended == [1]


def test_lease_is_in_force_again_when_it_is_admitted_again() -> None:
    ended: list[int] = []
    leases = AdmittedLeases(ended.append, nobody, LeaseClocks())
    leases.admit(Admission(1, "s"))
    leases.end(1)
    leases.admit(Admission(1, "s"))
    leases.enter(1, "s", "f")
    leases.leave(1)
    assert ended == [1]


@pytest.mark.parametrize("several", [False, True])
def test_functions_lease_is_that_of_its_first_session_or_of_several(*, several: bool) -> None:
    claimed: list[tuple[int, str]] = []
    leases = AdmittedLeases(
        nobody, lambda *first: claimed.append(first), LeaseClocks(), patience_s=1000.0
    )
    leases.admit(Admission(1, "team/f", several=several))
    with pytest.raises(CallRefused, match="another session"):
        leases.enter(1, "team/g/a", "team/g")
    assert claimed == []
    leases.enter(1, "team/f/a", "team/f")
    if several:
        leases.enter(1, "team/f/b", "team/f")
    else:
        with pytest.raises(CallRefused, match="another session"):
            leases.enter(1, "team/f/b", "team/f")
    leases.enter(1, "team/f/a", "team/f")
    assert claimed == [(1, "team/f/a")]


def test_session_that_asked_for_its_lease_is_not_told() -> None:
    claimed: list[tuple[int, str]] = []
    leases = AdmittedLeases(nobody, lambda *first: claimed.append(first), LeaseClocks())
    leases.admit(Admission(1, "team/f/a"))
    leases.enter(1, "team/f/a", "team/f")
    assert claimed == []


def test_divided_lease_lets_in_each_session_that_was_admitted_and_reports_each() -> None:
    claimed: list[tuple[int, str]] = []
    leases = AdmittedLeases(
        nobody, lambda *first: claimed.append(first), LeaseClocks(), patience_s=1000.0
    )
    leases.admit(Admission(1, "team/f/a", divided=True))
    leases.admit(Admission(1, "team/f/b", divided=True))
    for session in ("team/f/a", "team/f/b"):
        assert leases.enter(1, session, "team/f").admission.divided
    with pytest.raises(CallRefused, match="another session"):
        leases.enter(1, "team/f/c", "team/f")
    leases.admit(Admission(2, "team/f/a"))
    assert not leases.enter(2, "team/f/a", "team/f").admission.divided
    assert claimed == []


def test_time_of_calls_is_told_once_and_while_one_runs() -> None:
    now_s = 0.0
    clocks = LeaseClocks(lambda: now_s)
    first, second = (AdmittedLeases(nobody, nobody, clocks) for _ in range(2))
    for model in (first, second):
        model.admit(Admission(1, "s"))
    first.enter(1, "s", "f")
    now_s = 2.0
    assert clocks.take(1) == 2.0
    first.enter(1, "s", "f")
    second.enter(1, "s", "f")
    now_s = 3.0
    first.leave(1)
    now_s = 4.0
    first.leave(1)
    now_s = 5.0
    second.leave(1)
    now_s = 9.0
    assert clocks.take(1) == 3.0, "calls that run at once count once, also those of two models"
    assert clocks.take(1) == 0.0
    assert clocks.take(2) == 0.0


def test_model_that_leaves_ends_its_leases() -> None:
    ended: list[int] = []
    leases = AdmittedLeases(ended.append, nobody, LeaseClocks())
    for lease in (1, 2):
        leases.admit(Admission(lease, "s"))
    leases.end_all()
    assert ended == [1, 2]
