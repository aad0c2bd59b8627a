"""The consequences of an attempt, and when the next one is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_ext.calls.passed_headers import asked_wait_s
from gateway_ext.jobs.attempts import (
    AttemptOutcome,
    BackOff,
    JobDead,
    RetryPolicy,
    TryAgain,
)
from gateway_ext.jobs.values import Job, JobNumber, MemoryBody, call_lane
from tests.kit.worlds.job_world import ECHO, call

PATIENCE = RetryPolicy(
    attempts=3,
    most_age_s=100.0,
    most_retry_after_s=30.0,
    back_off=BackOff(first_s=1.0, most_s=10.0, jitter=0.5),
)


def verdict(
    tried: AttemptOutcome, attempts: int = 0, deferrals: int = 0, age_s: float = 1.0
) -> TryAgain | JobDead | None:
    return PATIENCE.verdict(tried, _job(attempts, deferrals), 100.0 + age_s, chance=1.0)


def _job(attempts: int = 0, deferrals: int = 0) -> Job:
    one = call(queued_at_s=100.0)
    return Job(JobNumber(1), one, MemoryBody(b""), call_lane(ECHO), attempts, deferrals)


@pytest.mark.parametrize("status", [200, 202, 301, 400, 404, 413, 500, 501, 507])
def test_answer_is_final_when_trying_again_would_not_change_it(status: int) -> None:
    assert verdict(AttemptOutcome(status, "it answered")) is None


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_function_that_is_not_able_now_is_tried_again(status: int) -> None:
    assert verdict(AttemptOutcome(status, "it answered")) == TryAgain(
        1.0, "it answered", counts=True
    )


def test_broken_connection_is_tried_again_whatever_its_status() -> None:
    assert verdict(AttemptOutcome(0, "broke", broken=True)) == TryAgain(1.0, "broke", counts=True)


def test_waits_grow_up_to_the_most() -> None:
    waits = [PATIENCE.back_off.wait_s(failures, 1.0) for failures in range(1, 7)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_attempts_end_in_a_dead_letter() -> None:
    assert isinstance(verdict(AttemptOutcome(503, "no"), attempts=1), TryAgain)
    assert verdict(AttemptOutcome(503, "no"), attempts=2) == JobDead(
        "3 attempts failed, the last one with: no"
    )


def test_call_that_was_not_taken_costs_no_attempt_but_time() -> None:
    busy = AttemptOutcome(429, "busy", taken=False)
    assert verdict(busy, attempts=2, deferrals=50) == TryAgain(10.0, "busy", counts=False)
    assert verdict(busy, age_s=100.0) == JobDead("not taken for 100 s: busy")


def test_retry_after_is_honoured_beyond_the_most_wait_but_not_for_ever() -> None:
    def asked(seconds: float) -> TryAgain | JobDead | None:
        tried = AttemptOutcome(503, "no", retry_after_s=seconds)
        return PATIENCE.verdict(tried, _job(), 100.0, chance=0.0)

    assert asked(20.0) == TryAgain(20.0, "no", counts=True)
    assert asked(86_400.0) == TryAgain(30.0, "no", counts=True)
    assert asked(0.0) == TryAgain(0.5, "no", counts=True)


def test_estimated_wait_is_honoured_no_longer_than_the_most_wait() -> None:
    busy = AttemptOutcome(429, "busy", taken=False, retry_after_s=3600.0, estimated=True)
    assert verdict(busy) == TryAgain(10.0 + 0.5, "busy", counts=False)
    assert verdict(replace(busy, retry_after_s=8.0)) == TryAgain(8.0 + 0.5, "busy", counts=False)
    assert verdict(replace(busy, estimated=False)) == TryAgain(30.0 + 0.5, "busy", counts=False)


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 100))
def test_wait_stays_within_what_was_asked_and_the_spread(
    failures: int, chance: float, asked_s: float
) -> None:
    wait_s = PATIENCE.back_off.wait_s(failures, chance, asked_s)
    assert max(0.5, asked_s) <= wait_s <= max(10.0, asked_s + 5.0)


@pytest.mark.parametrize(
    ("header_value", "expected_s"),
    [
        (b"7", 7.0),
        (b" 7 ", 7.0),
        (b"-1", 0.0),
        (b"soon", 0.0),
        (b"", 0.0),
        (b"9" * 400, 0.0),
        (b"Sat, 01 Jan 99999999999999999999 00:00:00 GMT", 0.0),
        (b"Sat, 01 Jan 2022 00:00:00 +99999999999999", 0.0),
        (b"Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        (b"Thu, 01 Jan 1970 00:00:05 GMT", 0.0),
    ],
)
def test_retry_after_is_read_as_seconds_or_date(header_value: bytes, expected_s: float) -> None:
    assert asked_wait_s([(b"x", b"1"), (b"Retry-After", header_value)], now_s=10.0) == expected_s


def test_function_may_set_its_own_number_of_attempts() -> None:
    assert PATIENCE.of(None) == PATIENCE
    assert PATIENCE.of(7).attempts == 7
