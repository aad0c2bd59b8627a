"""The phases of a load: in sequence and side by side."""

import pytest

from gpu_manager.runtimes.runtime import LoadPhases, LoadSpan, hidden_s


def phases(*spans: LoadSpan) -> LoadPhases:
    """A load at time 10 that waited a second for memory, and then had these parts."""
    times = iter([10.0, 11.0, 11.0, 16.0])
    found = LoadPhases(lambda: next(times))
    found.end("room")
    found.end("weights")
    found.add(spans)
    return found


def test_overlapping_phases_have_their_full_durations_and_what_they_hid() -> None:
    found = phases(LoadSpan("context", 11.0, 15.0), LoadSpan("read", 11.0, 13.0))

    assert found.took_s() == {"room": 1.0, "weights": 0.0, "context": 4.0, "read": 2.0}
    assert hidden_s(found.spans) == pytest.approx(2.0)
    assert str(found) == (
        "room 0.000-1.000, weights 1.000-1.000, read 1.000-3.000, context 1.000-5.000"
    )


def test_nothing_is_hidden_when_phases_follow_each_other() -> None:
    found = phases(LoadSpan("worker", 11.0, 12.0), LoadSpan("transfer", 12.0, 14.0))

    assert hidden_s(found.spans) == pytest.approx(0.0)


def test_waiting_for_what_is_read_counts_as_reading_only() -> None:
    found = phases(LoadSpan("read", 11.0, 14.0), LoadSpan("transfer", 11.5, 14.5))

    assert found.took_s()["transfer"] == 3.0
    assert hidden_s(found.spans) == pytest.approx(0.0)


def test_what_was_over_before_the_load_began_is_no_part_of_it() -> None:
    found = phases(LoadSpan("read", 2.0, 3.0), LoadSpan("verify", 9.0, 12.0))

    assert found.took_s() == {"room": 1.0, "weights": 0.0, "verify": 1.0}


def test_phases_less_what_they_hid_are_the_whole_load() -> None:
    found = phases(
        LoadSpan("worker", 11.5, 12.0),
        LoadSpan("context", 12.0, 15.0),
        LoadSpan("transfer", 12.0, 13.0),
    )

    found.finish()

    took_s = found.took_s()
    assert took_s["other"] == pytest.approx(1.5)
    assert sum(took_s.values()) - hidden_s(found.spans) == pytest.approx(6.0)
