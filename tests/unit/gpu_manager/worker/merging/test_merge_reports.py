"""What a worker reports of calls that waited together: what was added, once."""

from gpu_manager.worker import orders
from gpu_manager.worker.merging.records import (
    MergeCounts,
    MergeSums,
)
from gpu_manager.worker.orders import Singly
from torch_shim.wire.protocol import Frame, FrameKind, pack_frame, read_header


def travelled(report: orders.WorkerOrder) -> orders.CallsMerged:
    """The report as the manager reads it."""
    packed = pack_frame(FrameKind.REPORT, orders.bounded(report))
    header = read_header(packed, 64 << 10, 0)
    found = orders.read(Frame(header.kind, packed[-header.meta_bytes :], memoryview(b""), ()))
    assert isinstance(found, orders.CallsMerged)
    return found


def test_only_what_was_added_is_reported() -> None:
    told: list[orders.WorkerOrder] = []
    counts = MergeCounts()
    sums = MergeSums(3, counts, told.append)
    sums.report(at_once=True)
    assert told == []
    counts.groups, counts.calls, counts.compared = 1, 8, 4
    counts.singly[Singly.SLOWER] += 2
    counts.forbidden["d"] = Singly.DIFFERS
    sums.report(at_once=True)
    sums.report(at_once=True)
    counts.singly[Singly.SLOWER] += 1
    counts.singly[Singly.LEFT_OVER] += 1
    sums.report(at_once=True)
    assert told == [
        orders.CallsMerged(3, 1, 8, 4, {Singly.SLOWER: 2}, {"d": Singly.DIFFERS}),
        orders.CallsMerged(3, 0, 0, 0, {Singly.SLOWER: 1, Singly.LEFT_OVER: 1}, {}),
    ]


def test_each_report_has_room_when_many_programs_are_never_merged() -> None:
    told: list[orders.WorkerOrder] = []
    counts = MergeCounts()
    counts.groups = 1
    counts.forbidden = {f"{number:064x}": Singly.WRITES for number in range(1024)}
    MergeSums(3, counts, told.append).report(at_once=True)
    arrived = [travelled(report) for report in told]
    assert [report.groups for report in arrived] == [1, 0, 0, 0]
    never = [digest for report in arrived for digest in report.never]
    assert never == list(counts.forbidden)


def test_reports_are_no_more_frequent_than_they_need_be() -> None:
    told: list[orders.WorkerOrder] = []
    counts = MergeCounts()
    sums = MergeSums(3, counts, told.append)
    for _ in range(1000):
        counts.groups += 1
        sums.report()
    sums.report(at_once=True)
    assert sum(each.groups for each in told if isinstance(each, orders.CallsMerged)) == 1000
    assert len(told) < 100
