"""Orders keep their fields on the way, and wrong ones are found out."""

from typing import Any

import pytest

from gpu_manager.worker import orders
from torch_shim.errors import BadFrame
from torch_shim.protocol import Kind, pack_frame, read_header, unpack_meta

EXAMPLES: list[orders.Order] = [
    orders.Warm("cpu"),
    orders.Assign(0, 10, 20),
    orders.Ready(["no network"], 5),
    orders.Load("d", [[0, 4], [64, 4]], 128, 1 << 40, 0.0, 0.5),
    orders.Loaded(0.25, 7),
    orders.LoadFailed(True, "why"),
    orders.Limit(1, 0, False),
    orders.Admit(1),
    orders.End(2),
    orders.Ended(2),
    orders.Channel("s", "f"),
    orders.Ran(1, 3, 32, 0.125, 1 << 33),
    orders.Pressure(1, 2, 3),
    orders.Note("text", ""),
    orders.Fork(1),
    orders.Forked(1, 4711),
]


@pytest.mark.parametrize("order", EXAMPLES)
def test_order_is_the_same_when_it_has_travelled(order: orders.Order) -> None:
    packed = pack_frame(orders.KINDS[type(order)], list(order))
    header = read_header(packed)
    assert orders.read(header.kind, unpack_meta(packed[-header.meta_bytes :])) == order


def test_every_order_has_an_example() -> None:
    assert {type(order) for order in EXAMPLES} == set(orders.KINDS)
    assert len(set(orders.KINDS.values())) == len(orders.KINDS)


@pytest.mark.parametrize(
    ("kind", "meta"),
    [
        (Kind.RAN, [1, 1, 1, float("nan"), 1]),
        (Kind.RAN, [1, 1, 1, float("inf"), 1]),
        (Kind.RAN, [1, 1, 1, -0.5, 1]),
        (Kind.RAN, [1, 1, 1, 1, 1]),
        (Kind.RAN, [1, 1, 1, 0.5]),
        (Kind.RAN, [True, 1, 1, 0.5, 1]),
        (Kind.ENDED, [-1]),
        (Kind.ENDED, [1 << 63]),
        (Kind.ENDED, 1),
        (Kind.ENDED, None),
        (Kind.READY, [["a", 1], 5]),
        (Kind.READY, ["ab", 5]),
        (Kind.LOAD_FAILED, [1, "why"]),
        (Kind.CALL, []),
        (Kind.HELLO, []),
    ],
)
def test_order_is_a_bad_frame_when_a_field_is_wrong(kind: Kind, meta: Any) -> None:
    with pytest.raises(BadFrame):
        orders.read(kind, meta)
