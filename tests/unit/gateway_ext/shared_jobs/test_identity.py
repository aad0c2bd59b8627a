"""Identities of jobs: their numbers, and sequence numbers that are assigned again."""

from random import Random

from gateway_ext.jobs.queue import JobTally, QueueLimits
from gateway_ext.jobs.values import JobNumber, call_lane
from gateway_ext.shared_jobs.index import JobIndex
from gateway_ext.shared_jobs.records import (
    JobRecord,
    RecordState,
    StoredParts,
    job_numbers,
)
from tests.kit.worlds.job_world import ECHO

CALL = "x.jobs.call.k1"


def record(number: int, state: RecordState = RecordState.WAITING, **others: object) -> JobRecord:
    fields: dict[str, object] = {
        "number": JobNumber(number),
        "function": ECHO,
        "call_id": f"c{number}",
        "queued_at_s": 1.0,
        "call": StoredParts(number, (), 10),
        "state": state,
        "lane": call_lane(ECHO),
        "due_at_s": 1.0,
    }
    return JobRecord(**{**fields, **others})  # type: ignore[arg-type] # as named


def test_numbers_grow_also_when_the_clock_stands_or_goes_back() -> None:
    now = [1.8e9]
    numbers = job_numbers(lambda: now[0], Random(1))
    drawn = [next(numbers) for _ in range(10_000)]
    now[0] -= 1000.0
    drawn += [next(numbers) for _ in range(10)]
    now[0] += 2000.0
    drawn.append(next(numbers))
    assert drawn == sorted(set(drawn))


def test_numbers_are_exact_as_floats_and_fit_into_an_address_for_decades() -> None:
    latest_s = 1.8e9 + 40 * 365 * 86400
    number = next(job_numbers(lambda: latest_s, Random(1)))
    assert 10**12 < number < 2**53


def test_later_gateways_numbers_are_higher_whatever_they_draw() -> None:
    first = next(job_numbers(lambda: 1.8e9, Random(1)))
    assert all(next(job_numbers(lambda: 1.8e9 + 0.001, Random(at))) > first for at in range(50))


def test_look_finds_another_record_by_the_number_of_the_one_that_is_known() -> None:
    index = JobIndex(JobTally(QueueLimits()), "me.1", lambda _: True)
    index.apply(CALL, 5, record(1, RecordState.CLAIMED, owner="other.1"))
    index.apply("x.jobs.call.k2", 6, record(2, RecordState.GONE))
    index.apply("x.jobs.call.k3", 7, record(3))
    index.begin_reading()
    index.apply(CALL, 5, record(4))
    index.apply("x.jobs.call.k2", 6, record(5))
    index.apply("x.jobs.call.k3", 7, record(6, RecordState.GONE))
    index.end_reading()
    assert [index.is_alive(JobNumber(number)) for number in range(1, 7)] == [
        *(False, False, False),
        *(True, True, False),
    ]
    assert index.mark_of("x.jobs.call.k3") == 7
    assert index.tally.calls == {ECHO: 2}
