"""Orders keep their fields on the way, and wrong ones are found out."""

from typing import Any

from msgspec import structs

from gpu_manager.worker import orders
from gpu_manager.worker.orders import Singly
from tests.kit.outcomes import instead_of, outcome
from torch_shim.errors import BadFrame
from torch_shim.wire.protocol import Frame, FrameKind, encode

EXAMPLES: list[orders.WorkerOrder] = [
    orders.Warm("cpu", 0.25, 1 << 28),
    orders.Assign(0, 10, 20, [1.5e9, 524288.0], 7),
    orders.Ready(["no network"], 5),
    orders.LoadImage(
        1,
        "d",
        [[0, 4], [64, 4]],
        128,
        1 << 40,
        0.0,
        0.5,
        arriving=True,
        shared=False,
        gpu_share=0.25,
        merged=8,
        together_bytes=1 << 31,
        ahead=True,
    ),
    orders.ImageLoaded(1, 0.25, 7, [1.0, 2.0], [1.5, 2.5]),
    orders.ImageLoadFailed(1, True, "why"),
    orders.SetLimit(1, 1, 2, 0, False),
    orders.AdmitCalls(
        1, orders.Admission(1, "team/f/s", False, True, orders.LeaseTerms((0, 3), 7, 4, 2))
    ),
    orders.CallsClaimed(1, 1, "team/f/s"),
    orders.EndCalls(1, 2),
    orders.CallsEnded(1, 2, 0.5),
    orders.AskComputed(1, 2),
    orders.CallsComputed(1, 2, 0.5),
    orders.OpenChannel(1, "s", "f"),
    orders.StopWorker(),
    orders.DropModel(2),
    orders.ModelDropped(2, 1 << 29),
    orders.CallsRan(1, 1, 3, 32, 0.125, 1 << 33, 1 << 30, 4, [0.5] * 13, ""),
    orders.Pressure(1, 1, 2, 3),
    orders.Note("text", ""),
    orders.HurryLoad(1),
    orders.CallsMerged(
        1, 2, 24, 6, {Singly.SLOWER: 3, Singly.LEFT_OVER: 4}, {"d" * 64: Singly.WRITES}
    ),
    orders.HandOver(1, "node.handle", 1 << 20),
    orders.HandedOver(1, "node.handle", True),
    orders.WithdrawData(1, "node.handle"),
    orders.LendData(1, "node.handle"),
    orders.DataLent(1, "node.handle", True, 1 << 20, 512, b"token"),
    orders.BorrowData(1, "node.handle"),
    orders.DataBorrowed(1, "node.handle", True, 1 << 20, 512, b"", b"about", True),
    orders.DataGivenBack(1, "node.handle"),
    orders.GrantData(1, "node.", 21, "work", 1 << 20, 16),
    orders.RecallGrant(1),
    orders.GrantLeft(1, 1 << 20, 16),
    orders.DataPut(1, "team/f/s", "node.handle", 1 << 20, b"about", 0.5),
    orders.BytesMoved([[1.0, 0.5], [0.0, 0.0], [2.0, 0.0]], []),
    orders.Fork(1),
    orders.Forked(1, 4711),
]


def test_orders_are_the_same_when_they_have_travelled() -> None:
    wrong = [(order, found) for order in EXAMPLES if (found := outcome(travel, order)) != order]
    assert wrong == []


def travel(order: Any, kind: FrameKind = FrameKind.REPORT) -> orders.WorkerOrder:
    """The order that is read from a frame with this metadata."""
    return orders.read(Frame(kind, encode(order), memoryview(b""), ()))


def test_reports_are_read_when_a_program_has_made_their_numbers_absurd() -> None:
    wrong = []
    for number in (1 << 80, -1, 1 << 62, 2.0**90, -0.5, float("inf"), float("-inf"), float("nan")):
        for order in EXAMPLES:
            fields = structs.astuple(order)
            absurd = type(order)(*(_with(value, number) for value in fields))
            if isinstance(found := outcome(travel, orders.bounded(absurd)), Exception):
                wrong.append((absurd, found))
    assert wrong == []


def test_reports_are_as_they_were_when_their_numbers_are_possible() -> None:
    assert [orders.bounded(order) for order in EXAMPLES] == EXAMPLES


def _with(value: Any, number: float) -> Any:
    """The field with this number in the place of each of the same type."""
    if isinstance(value, list):
        return [_with(each, number) for each in value]
    return number if type(value) is type(number) else value


def test_every_order_has_an_example() -> None:
    names = {
        name
        for name, kind in vars(orders).items()
        if isinstance(kind, type) and issubclass(kind, orders.WorkerOrder)
    }
    assert {type(order).__name__ for order in EXAMPLES} == names - {"WorkerOrder", "DataOrder"}


RAN = ["CallsRan", 1, 1, 3, 32, 0.125, 7, 7, 4, [0.5], ""]
WRONG: list[Any] = [
    RAN[:-1],
    [*RAN, 1],
    *([*RAN[:5], number, *RAN[6:]] for number in (float("nan"), float("inf"), -0.5, "1", 1 << 62)),
    *([*RAN[:2], number, *RAN[3:]] for number in (True, 1.0, -1, 1 << 62, 1 << 63, None)),
    ["CallsEnded", 1, 1],
    ["Nonsense", 1],
    ["WorkerOrder"],
    [7, 1],
    [],
    "CallsEnded",
    None,
    ["Ready", ["a", 1], 5],
    ["Ready", "ab", 5],
    ["ImageLoadFailed", 1, 1, "why"],
]


def test_order_is_a_bad_frame_when_a_field_is_wrong() -> None:
    wrong = [(meta, taken) for meta in WRONG if (taken := instead_of(BadFrame, travel, meta))]
    assert wrong == []


def test_frame_of_a_function_is_no_order() -> None:
    assert not instead_of(BadFrame, travel, EXAMPLES[0], FrameKind.CALL)


def test_text_of_a_worker_writes_no_lines_of_its_own_into_the_log() -> None:
    packed = encode(["Note\nall is \x1b[32mwell", "", ""])
    refused = outcome(lambda: orders.read(Frame(FrameKind.REPORT, packed, memoryview(b""), ())))
    assert isinstance(refused, BadFrame)
    assert str(refused).isprintable()
    assert "all is" in str(refused)
