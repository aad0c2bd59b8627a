"""Channels: every message is received once and in order, wherever the stream breaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.model.actions import Demote, Dispatch, EndLease, Order, Prepare
from scheduler.model.errors import BadValue
from scheduler.model.events import GpuSnapshot, LiveLease, NodeSnapshot, SlotFreed
from scheduler.model.values import Estimate, LeaseId, ModelLoad, RequestId, SlotId
from scheduler.service.streams.nodes import amended
from scheduler.wire.node_stream import Beat, Contended, DownChannel, Given, Leave, Report, UpChannel
from scheduler.wire.refusals import CallRefusal, error_of
from tests.kit.cores.builders import gpu

SLOT, GPU, NODE = SlotId("g0"), GpuId("g0"), NodeId("n0")


def end(lease: int) -> EndLease:
    return EndLease(SLOT, LeaseId(lease), "released")


def freed(lease: int) -> Report:
    return Report(SlotFreed(SLOT, LeaseId(lease)))


# True: the manager sends the next message; False: the scheduler does; a number: this many
# of the messages under way arrive on either side, then the socket breaks.
@given(steps=st.lists(st.booleans() | st.integers(0, 4), max_size=60))
def test_everything_is_received_once_and_in_order_when_sockets_break(
    steps: list[bool | int],
) -> None:
    up, down = UpChannel(), DownChannel()
    sent_up: list[int] = []
    sent_down: list[int] = []
    received_up: list[int] = []
    received_down: list[int] = []
    under_way_up: list[bytes] = []
    under_way_down: list[bytes] = []

    def arrive(count: int) -> None:
        received_up.extend(
            message.event.lease
            for message in map(down.unpack, under_way_up[:count])
            if isinstance(message, Report) and isinstance(message.event, SlotFreed)
        )
        received_down.extend(
            message.order.lease
            for message in map(up.unpack, under_way_down[:count])
            if isinstance(message, Given) and isinstance(message.order, EndLease)
        )

    for step in [*steps, 0, 10_000]:
        if step is True:
            sent_up.append(len(sent_up))
            under_way_up.append(up.pack(freed(sent_up[-1])))
        elif step is False:
            sent_down.append(len(sent_down))
            under_way_down.append(down.pack(Given(1, end(sent_down[-1]))))
        else:
            arrive(step)
            under_way_up = [*up.kept_after(down.seen), up.pack_hint(Beat())]
            under_way_down = [*down.kept_after(up.seen), down.pack_hint(Beat())]
    assert (received_up, received_down) == (sent_up, sent_down)
    arrive(10_000)
    assert (down.seen, up.seen) == (len(sent_up), len(sent_down))


def test_message_is_kept_until_the_other_end_acknowledges_it() -> None:
    up, down = UpChannel(), DownChannel()
    order = down.pack(Given(1, end(1)))
    assert down.unacknowledged_orders() == [end(1)]
    before = up.pack(freed(7))
    assert up.unpack(order) == Given(1, end(1))
    assert down.unpack(before) == freed(7)  # packed before the order arrived
    assert down.unacknowledged_orders() == [end(1)]
    assert down.unpack(up.pack_hint(Beat())) == Beat()
    assert down.unacknowledged_orders() == []
    assert down.unacknowledged_count == 0


def test_message_is_not_received_again_when_it_arrives_twice() -> None:
    up, down = UpChannel(), DownChannel()
    data = up.pack(Leave())
    assert down.unpack(data) == Leave()
    assert down.unpack(data) is None
    assert down.unpack(up.pack_hint(Beat())) == Beat()


@pytest.mark.parametrize("cut", [1, 2, 5, 13])
def test_message_is_refused_when_it_is_cut_off(cut: int) -> None:
    up, down = UpChannel(), DownChannel()
    frame = up.pack(freed(1))
    with pytest.raises(BadValue):
        down.unpack(frame[:-cut])
    assert down.seen == 0
    assert down.unpack(frame) == freed(1)


def test_frame_is_refused_when_more_than_one_message_is_in_it() -> None:
    up, down = UpChannel(), DownChannel()
    with pytest.raises(BadValue, match="trailing"):
        down.unpack(up.pack(freed(1)) + up.pack_hint(Beat()))


def test_channel_counts_what_it_keeps_when_messages_are_seen_one_by_one() -> None:
    up, down = UpChannel(), DownChannel()
    frames = [down.pack(Given(1, end(lease))) for lease in range(5)]
    for number, frame in enumerate(frames):
        up.unpack(frame)
        down.unpack(up.pack_hint(Beat()))
        assert down.unacknowledged_count == 4 - number
        assert down.kept_after(number + 1) == frames[number + 1 :]


def test_gap_is_refused_when_a_message_is_missing() -> None:
    up, down = UpChannel(), DownChannel()
    up.pack(Leave())
    with pytest.raises(BadValue, match=r"\b2\b.*\b0\b"):
        down.unpack(up.pack(Leave()))


def test_channel_cannot_resume_when_the_other_end_lacks_what_it_had_seen() -> None:
    up, down = UpChannel(), DownChannel()
    up.unpack(down.pack(Contended(waiting=True)))
    down.unpack(up.pack_hint(Beat()))
    assert down.kept_after(1) == []
    for seen in (0, 2):
        with pytest.raises(BadValue):
            down.kept_after(seen)


def test_channel_is_overfull_when_nothing_is_ever_seen() -> None:
    down = DownChannel()
    while not down.overfull:
        down.pack(Given(1, end(1)))
    assert len(down.unacknowledged_orders()) > 10_000


def test_channel_is_overfull_of_large_messages_only_while_they_are_not_seen() -> None:
    up, down = UpChannel(), DownChannel()
    large = Given(1, EndLease(SLOT, LeaseId(1), "x" * (1 << 20)))
    for _ in range(70):
        up.unpack(down.pack(large))
        down.unpack(up.pack_hint(Beat()))
        assert not down.overfull
    for _ in range(65):
        down.pack(large)
    assert down.overfull


def test_error_is_unknown_when_no_error_has_that_name() -> None:
    with pytest.raises(BadValue):
        error_of(CallRefusal("SystemExit", "now"))


# -- snapshots that crossed orders ----------------------------------------------------------------

SPEC = gpu("g0", node="n0")
HELD = LiveLease(LeaseId(1), SLOT, (ModelId("a"),))


def snapshot(*models: str, leases: tuple[LiveLease, ...] = ()) -> NodeSnapshot:
    residents = tuple((ModelId(model), 100) for model in models)
    return NodeSnapshot(NODE, (GpuSnapshot(SPEC, residents, leases),))


def dispatch(lease: int, model: str) -> Dispatch:
    return Dispatch(
        lease=LeaseId(lease),
        slot=SLOT,
        gpu=GPU,
        node=NODE,
        requests=(RequestId("r"),),
        hit=True,
        held_elsewhere=False,
        estimate=Estimate(0.0, 1.0),
        rule="rule",
        models=(ModelId(model),),
    )


def prepare(lease: int, victims: str, load: str, *, prefetch: bool = False) -> Prepare:
    loads = (ModelLoad(ModelId(load), 200, Tier.HOST),)
    leaving = tuple(ModelId(victim) for victim in victims)
    return Prepare(SLOT, GPU, LeaseId(lease), leaving, loads, prefetch)


def test_snapshot_is_as_it_was_when_no_order_crossed_it() -> None:
    assert amended(snapshot("a", leases=(HELD,)), []) == snapshot("a", leases=(HELD,))


def test_snapshot_has_what_was_ordered_when_orders_crossed_it() -> None:
    orders: list[Order] = [
        prepare(2, "a", "c"),
        dispatch(2, "c"),
        end(1),
        Demote(GPU, ModelId("b"), "asked"),
    ]

    (found,) = amended(snapshot("a", "b", leases=(HELD,)), orders).gpus

    assert found.residents == (("c", 200),)
    assert found.leases == (HELD, LiveLease(LeaseId(2), SLOT, (ModelId("c"),), (RequestId("r"),)))


def test_snapshot_has_the_lease_of_a_prefetch_when_it_crossed_one() -> None:
    (found,) = amended(snapshot(), [prepare(2, "", "c", prefetch=True)]).gpus
    assert found.leases == (LiveLease(LeaseId(2), SLOT, (ModelId("c"),)),)


def test_snapshot_has_the_loads_under_way_when_orders_crossed_it() -> None:
    reported = snapshot("a", "b")
    (bare,) = reported.gpus
    loading = replace(reported, gpus=(replace(bare, loading=(ModelId("a"), ModelId("b"))),))
    (found,) = amended(loading, [prepare(2, "a", "c")]).gpus
    assert found.loading == (ModelId("b"), ModelId("c"))


def test_orders_for_a_lost_gpu_change_nothing_when_the_snapshot_lacks_it() -> None:
    bare = NodeSnapshot(NODE, ())
    assert amended(bare, [prepare(2, "", "c"), dispatch(2, "c")]) == bare
