"""Events, actions and other values as they are sent: there and back, and nothing else is read."""

import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import json, msgpack

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.model.actions import Action, EndLease, Order, SetTimer
from scheduler.model.errors import BadValue
from scheduler.model.events import DeadlinePassed, Event, ModelLoaded, NodeSnapshot, PolicySet
from scheduler.model.values import LeaseId, Placement, Request, RequestId, SlotId
from scheduler.wire.cluster_status import Status
from scheduler.wire.codec import pack, read
from tests.kit.cores.action_digest import lived
from tests.kit.outcomes import instead_of, outcome

few = settings(max_examples=40)  # of values that are large
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
EVENTS: msgpack.Decoder[Event] = msgpack.Decoder(Event)
ACTIONS: msgpack.Decoder[Action] = msgpack.Decoder(Action)
ORDERS: msgpack.Decoder[Order] = msgpack.Decoder(Order)
REQUESTS = msgpack.Decoder(Request)
PLACEMENTS = msgpack.Decoder(Placement)
STATUSES = msgpack.Decoder(Status)
SNAPSHOTS = msgpack.Decoder(NodeSnapshot)
RECORDED_EVENTS: json.Decoder[Event] = json.Decoder(Event)


def what_differs(decoder: msgpack.Decoder[Any], kind: type) -> object:
    """The failure of a value of this kind that came back as another; None if there is none."""

    @few
    @given(value=st.from_type(kind))
    def check(value: object) -> None:
        returned = read(decoder, pack(value))
        assert (returned, type(returned)) == (value, kind)

    return outcome(check)


def test_events_are_the_same_when_they_come_back() -> None:
    wrong = [(kind, found) for kind in get_args(Event) if (found := what_differs(EVENTS, kind))]

    assert get_args(Event)
    assert wrong == []


def test_actions_are_the_same_when_they_come_back() -> None:
    wrong = [(kind, found) for kind in get_args(Action) if (found := what_differs(ACTIONS, kind))]

    assert get_args(Action)
    assert wrong == []


@pytest.mark.parametrize(
    ("kind", "decoder"), [(Request, REQUESTS), (Placement, PLACEMENTS), (Status, STATUSES)]
)
@few
@given(data=st.data())
def test_value_is_the_same_when_it_comes_back(
    kind: type, decoder: msgpack.Decoder[Any], data: st.DataObject
) -> None:
    value = data.draw(st.from_type(kind))
    assert read(decoder, pack(value)) == value


def test_a_life_is_the_same_when_it_comes_back() -> None:
    world = lived("lalbo3", seed=5, count=400)
    for (event, _), actions in zip(world.log, world.answers, strict=True):
        assert read(EVENTS, pack(event)) == read(RECORDED_EVENTS, json.encode(event)) == event
        assert [read(ACTIONS, pack(action)) for action in actions] == actions


def test_value_is_sent_with_its_name_and_without_defaults() -> None:
    timer = SetTimer(2.0, DeadlinePassed(RequestId("r")))
    assert msgpack.decode(pack(timer)) == {
        "type": "SetTimer",
        "at_s": 2.0,
        "event": {"type": "DeadlinePassed", "request": "r"},
    }
    loaded = ModelLoaded(GpuId("g0"), ModelId("bert"), 1.5, Tier.HOST)
    fields = {"type": "ModelLoaded", "gpu": "g0", "model": "bert", "load_s": 1.5, "source": 2}
    assert msgpack.decode(pack(loaded)) == fields


def test_integer_is_a_number_of_seconds_when_one_is_wanted() -> None:
    sent = {"type": "PolicySet", "policy": "lb", "parameters": {"limit": 3}}
    policy = read(EVENTS, pack(sent))
    assert isinstance(policy, PolicySet)
    assert (policy.parameters, type(policy.parameters["limit"])) == ({"limit": 3.0}, float)


def _freed(**fields: object) -> dict[str, object]:
    return {"type": "SlotFreed", "slot": "g0", "lease": 1} | fields


def _policy(parameters: object) -> dict[str, object]:
    return {"type": "PolicySet", "policy": "lb", "parameters": parameters}


def _model(**fields: object) -> dict[str, object]:
    return {"type": "ModelRegistered", "model": {"id": "m"} | fields}


REFUSED: tuple[tuple[object, str], ...] = (
    (None, "Expected `object`, got `None`"),
    ("SlotFreed", "Expected `object`, got `str`"),
    (["SlotFreed", {"slot": "g0", "lease": 1}], "Expected `object`, got `array`"),
    ({"slot": "g0", "lease": 1}, "missing required field `type`"),
    ({"type": "SlotFreed", "slot": "g0"}, "missing required field `lease`"),
    (_freed(why=""), "unknown field `why`"),
    (_freed(lease="1"), "Expected `int`, got `str` - at `$.lease`"),
    (_freed(lease=True), "got `bool` - at `$.lease`"),
    (_freed(lease=1.0), "got `float` - at `$.lease`"),
    (_freed(slot=0), "Expected `str`, got `int` - at `$.slot`"),
    (_freed() | {1: 2}, "Expected `str`"),
    ({"type": "EndLease", "slot": "g0", "lease": 1, "reason": ""}, "Invalid value 'EndLease'"),
    ({"type": ["SlotFreed"]}, "at `$.type`"),
    ({"type": "GpuLost", "gpu": "g0", "running": "perhaps"}, "Invalid enum value 'perhaps'"),
    ({"type": "RequestArrived", "request": {"id": "r", "function": "f", "models": "m"}}, "models"),
    (_policy({"x": "nan"}), "parameters"),
    (_policy({"x": float("nan")}), "parameters"),
    (_policy({"x": float("inf")}), "parameters"),
    (_policy([["x", 1.0]]), "Expected `object`, got `array`"),
    (_model(load_s={7: 1.0}), "Invalid enum value 7"),
    (_model(run_s=[[1, "any"]]), "Expected `array` of length 3, got 2"),
    (_model(features={"x": None}), "features"),
    (
        {"type": "LeaseUsed", "lease": 1, "function": "f", "ends": [["r", 1.0]] * 5000},
        "Expected `array` of length <= 4096",
    ),
)


def test_value_is_refused_when_it_is_not_what_an_event_has() -> None:
    wrong = [
        (plain, taken)
        for plain, complaint in REFUSED
        if (taken := instead_of(BadValue, read, EVENTS, pack(plain), match=re.escape(complaint)))
    ]
    assert wrong == []


def test_complaint_is_short_and_printable_when_what_was_sent_is_not() -> None:
    for huge in ("x" * 1_000_000, {"type": "\n" * 1_000}, _freed(**{"\x1b[2J" * 1_000: 1})):
        with pytest.raises(BadValue) as refused:
            read(EVENTS, pack(huge))
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 2_000


def test_list_is_refused_when_only_its_header_is_there() -> None:
    used = pack({"type": "LeaseUsed", "lease": 1, "function": "f", "uses": []})
    for most, complaint in ((1 << 12, "truncated"), (1 << 31, "length <= 4096")):
        with pytest.raises(BadValue, match=complaint):
            read(EVENTS, used[:-1] + b"\xdd" + most.to_bytes(4, "big"))


def test_order_is_refused_when_it_is_another_action() -> None:
    end = EndLease(SlotId("g0"), LeaseId(1), "released")
    assert read(ORDERS, pack(end)) == end
    with pytest.raises(BadValue):
        read(ORDERS, pack(SetTimer(1.0, DeadlinePassed(RequestId("r")))))


@given(
    plain=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
        lambda some: st.lists(some) | st.dictionaries(st.text(), some),
    )
)
def test_anything_is_refused_when_it_is_no_event(plain: object) -> None:
    decoders: tuple[msgpack.Decoder[Any], ...] = EVENTS, ACTIONS, REQUESTS, STATUSES, SNAPSHOTS
    for decoder in decoders:
        with pytest.raises(BadValue):
            read(decoder, pack(plain))
