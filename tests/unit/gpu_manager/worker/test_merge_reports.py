"""What a worker reports of calls that waited together: what was added, once."""

from gpu_manager.worker import worker_orders
from gpu_manager.worker.call_reports import MergeSums
from gpu_manager.worker.merging.merge_records import MergeCounts, Singly


def test_only_what_was_added_is_reported() -> None:
    told: list[worker_orders.WorkerOrder] = []
    counts = MergeCounts()
    sums = MergeSums(3, counts, told.append)
    sums.flush()
    assert told == []
    counts.groups, counts.calls, counts.compared = 1, 8, 4
    counts.singly[Singly.SLOWER] += 2
    counts.forbidden["d"] = Singly.DIFFERS
    sums.flush()
    sums.flush()
    counts.singly[Singly.SLOWER] += 1
    counts.singly[Singly.LEFT_OVER] += 1
    sums.flush()
    assert told == [
        worker_orders.CallsMerged(3, 1, 8, 4, ["slower"], [2], ["d", "differs"]),
        worker_orders.CallsMerged(3, 0, 0, 0, ["slower", "left_over"], [1, 1], []),
    ]


def test_reports_are_no_more_frequent_than_they_need_be() -> None:
    told: list[worker_orders.WorkerOrder] = []
    counts = MergeCounts()
    sums = MergeSums(3, counts, told.append)
    for _ in range(1000):
        counts.groups += 1
        sums.note()
    sums.flush()
    assert sum(each.groups for each in told if isinstance(each, worker_orders.CallsMerged)) == 1000
    assert len(told) < 100
