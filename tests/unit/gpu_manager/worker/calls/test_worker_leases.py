"""The gate in a worker: no call without a lease, and an end that comes after the last call."""

import threading

import pytest

from gpu_manager.worker.call_errors import CallRefused
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases


def test_call_enters_when_the_order_that_admits_it_comes_after_it() -> None:
    leases = AdmittedLeases(lambda _: None, patience_s=10.0)
    entering = threading.Thread(target=leases.enter, args=(1, "s"))
    entering.start()
    leases.admit(2, "s")
    assert entering.is_alive()
    leases.admit(1, "s")
    entering.join(10)
    assert not entering.is_alive()


def test_call_is_refused_at_once_when_its_lease_has_ended() -> None:
    leases = AdmittedLeases(lambda _: None, patience_s=1000.0)
    leases.admit(1, "s")
    leases.end(1)
    with pytest.raises(CallRefused) as refused:
        leases.enter(1, "s")
    assert refused.value.failure == "lease not in force"


def test_call_is_refused_at_once_when_its_lease_is_another_sessions() -> None:
    ended: list[int] = []
    leases = AdmittedLeases(ended.append, patience_s=1000.0)
    leases.admit(1, "team/f/mine")
    with pytest.raises(CallRefused, match="another session"):
        leases.enter(1, "team/f/neighbours")
    leases.enter(1, "team/f/mine")
    leases.end(1)
    leases.leave(1)
    assert ended == [1]


def test_call_is_refused_when_its_lease_never_comes() -> None:
    with pytest.raises(CallRefused):
        AdmittedLeases(lambda _: None, patience_s=0.0).enter(1, "s")


def test_end_is_told_after_the_last_call_when_several_are_under_way() -> None:
    ended: list[int] = []
    leases = AdmittedLeases(ended.append)
    leases.admit(1, "s")
    leases.enter(1, "s")
    leases.enter(1, "s")
    leases.end(1)
    with pytest.raises(CallRefused):
        leases.check(1)
    leases.leave(1)
    assert ended == []
    leases.leave(1)
    assert ended == [1]


def test_lease_is_in_force_again_when_it_is_admitted_again() -> None:
    ended: list[int] = []
    leases = AdmittedLeases(ended.append)
    leases.admit(1, "s")
    leases.end(1)
    leases.admit(1, "s")
    leases.enter(1, "s")
    leases.leave(1)
    assert ended == [1]
