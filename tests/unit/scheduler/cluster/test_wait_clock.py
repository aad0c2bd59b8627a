"""How long somebody has waited, all in all."""

from scheduler.cluster.request_queue import WaitClock


def test_clock_runs_only_while_somebody_waits() -> None:
    clock = WaitClock()
    for waiting, at_s in ((1, 1.0), (2, 2.0), (0, 3.0), (0, 4.0), (1, 5.0)):
        clock.note(waiting, at_s)
    assert [clock.read_s(at_s) for at_s in (5.0, 5.5, 8.0)] == [2.0, 2.5, 5.0]
    clock.note(0, 8.0)
    assert clock.read_s(11.0) == 5.0
