"""When calls run as one: after a look at a single one and comparisons, where it is faster."""

from gpu_manager.worker.merging.records import (
    MOST_FORBIDDEN,
    SIZES,
    MergeCounts,
    MergeRecord,
    MergeRecords,
    Plan,
)
from gpu_manager.worker.orders import Singly


def seen(single_s: float = 1.0) -> MergeRecord:
    record = MergeRecord()
    record.outputs = []
    record.note_single(single_s)
    return record


def compared(record: MergeRecord, size: int, merged_s: float, times: int = 2) -> None:
    for _ in range(times):
        assert record.plan(size) == Plan(size, compares=True)
        record.note_compared(size, merged_s, float(size))


def test_nothing_is_merged_before_a_single_call_was_seen() -> None:
    assert MergeRecord().plan(8) is Singly.UNKNOWN


def test_a_size_is_merged_when_two_comparisons_say_that_it_pays() -> None:
    record = seen()
    compared(record, 8, 2.0)
    assert record.plan(8) == Plan(8, compares=False)
    assert record.plan(11) == Plan(8, compares=False)
    assert record.plan(12) == Plan(12, compares=True)


def test_the_size_with_the_shortest_time_a_call_is_made() -> None:
    record = seen()
    compared(record, 4, 1.0)
    compared(record, 8, 6.0)
    assert record.plan(8) == Plan(4, compares=False)


def test_a_slow_first_comparison_is_forgiven_when_the_second_is_fast() -> None:
    record = seen()
    compared(record, 4, 20.0, times=1)
    compared(record, 4, 1.0, times=1)
    assert record.plan(4) == Plan(4, compares=False)


def test_a_size_that_does_not_pay_rests_longer_each_time() -> None:
    record, tries = seen(), []
    for number in range(40_000):
        if isinstance(record.plan(2), Plan):
            record.note_compared(2, 2.0, 2.0)
            tries.append(number)
    assert tries[:4] == [0, 1, 257, 258]
    assert len(tries) == 10
    assert record.plan(2) is Singly.SLOWER


def test_a_hopeless_size_is_compared_once() -> None:
    record = seen()
    compared(record, 2, 100.0, times=1)
    assert record.plan(2) is Singly.SLOWER


def test_a_size_is_compared_again_when_it_became_slower_than_single_calls() -> None:
    record = seen()
    compared(record, 8, 2.0)
    for _ in range(20):
        record.note_merged(8, 30.0)
    assert record.plan(8) == Plan(8, compares=True)


def test_pauses_grow_with_each_size_that_does_not_pay_and_shrink_with_one_that_does() -> None:
    record = seen()
    pauses = []
    for size, merged_s in ((8, 8.0), (8, 8.0), (6, 60.0), (4, 4.0), (4, 1.0), (2, 1.0), (2, 1.0)):
        record.note_compared(size, merged_s, float(size))
        pauses.append(record.pauses)
    assert pauses == [3.0, 4.5, 6.75, 6.75, 4.5, 4.5, 3.0]
    for _ in range(20):
        record.note_compared(8, 100.0, 8.0)
    assert record.pauses == 100.0


def test_pauses_grow_when_groups_become_slower_than_single_calls() -> None:
    record = seen()
    compared(record, 8, 2.0)
    while record.plan(8) == Plan(8, compares=False):
        record.note_merged(8, 30.0)
    assert record.pauses == 4.5


def test_a_device_that_became_slower_for_all_is_compared_once_more() -> None:
    record = seen()
    compared(record, 8, 2.0)
    while record.plan(8) == Plan(8, compares=False):
        record.note_merged(8, 12.0)
    for _ in range(2):
        record.note_compared(8, 12.0, 48.0)
    for _ in range(1000):
        record.note_merged(8, 12.0)
    assert record.plan(8) == Plan(8, compares=False)


def test_larger_sizes_rest_when_memory_is_short() -> None:
    record = seen()
    record.note_short(8)
    assert record.plan(32) == Plan(6, compares=True)
    record.note_short(2)
    assert record.plan(32) is Singly.MEMORY


def test_a_size_rests_when_groups_fail_one_after_the_other() -> None:
    record = seen()
    compared(record, 2, 1.0)
    for _ in range(2):
        record.note_failed(2)
    record.note_merged(2, 1.0)
    for _ in range(3):
        assert record.plan(2) == Plan(2, compares=False)
        record.note_failed(2)
    assert record.plan(2) is Singly.FAILED


def test_one_call_is_left_over() -> None:
    assert seen().plan(1) is Singly.LEFT_OVER


def test_times_of_other_sizes_are_of_no_use() -> None:
    record = seen()
    assert 5 not in SIZES
    record.note_compared(5, 1.0, 5.0)
    record.note_merged(5, 1.0)
    record.note_failed(5)
    assert record.plan(5) == Plan(4, compares=True)


def test_a_program_is_forbidden_once_and_for_all() -> None:
    counts = MergeCounts()
    assert counts.why_never("d") is None
    counts.forbid("d", Singly.DIFFERS)
    counts.forbid("d", Singly.WRITES)
    assert counts.why_never("d") is Singly.DIFFERS


def test_nothing_is_merged_any_more_when_too_many_programs_are_forbidden() -> None:
    counts = MergeCounts()
    for number in range(2 * MOST_FORBIDDEN):
        counts.forbid(f"{number}", Singly.DIFFERS)
    assert counts.why_never("0") is Singly.DIFFERS
    assert counts.why_never(f"{2 * MOST_FORBIDDEN - 1}") is Singly.TOO_MANY
    assert counts.why_never("another") is Singly.TOO_MANY


def test_records_are_bounded() -> None:
    records = MergeRecords()
    first = records.of("first")
    for number in range(3000):
        records.of(number)
    assert records.of("first") is not first
