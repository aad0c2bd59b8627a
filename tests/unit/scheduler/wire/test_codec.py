"""Events, actions and other values as plain ones: there and back, and nothing else is read."""

import json
import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.model.actions import Action, EndLease, SetTimer
from scheduler.model.errors import BadValue
from scheduler.model.events import (
    DeadlinePassed,
    Event,
    ModelLoaded,
    NodeSnapshot,
    PolicySet,
    SlotFreed,
)
from scheduler.model.values import LeaseId, Placement, Request, RequestId, SlotId
from scheduler.wire.cluster_status import Status
from scheduler.wire.codec import ORDERS, PLACEMENTS, STATUSES, Codec
from tests.kit.cores.action_digest import lived
from tests.kit.outcomes import instead_of, outcome

few = settings(max_examples=40)  # of values that are large
st.register_type_strategy(float, st.floats(allow_nan=False))
FREED = SlotFreed(SlotId("g0"), LeaseId(1))
EVENTS: Codec[Event] = Codec(Event)
ACTIONS: Codec[Action] = Codec(Action)
REQUESTS: Codec[Request] = Codec(Request)
SNAPSHOTS: Codec[NodeSnapshot] = Codec(NodeSnapshot)


def there_and_back(kind: Codec[Any], value: object) -> object:
    """Through JSON's text, as a recording and a curious client see it."""
    return kind.from_plain(json.loads(json.dumps(kind.to_plain(value), allow_nan=False)))


def what_differs(codec: Codec[Any], kind: type) -> object:
    """The failure of a value of this kind that came back as another; None if there is none."""

    @few
    @given(value=st.from_type(kind))
    def check(value: object) -> None:
        returned = there_and_back(codec, value)
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
    ("kind", "plain"), [(Request, REQUESTS), (Placement, PLACEMENTS), (Status, STATUSES)]
)
@few
@given(data=st.data())
def test_value_is_the_same_when_it_comes_back(
    kind: type, plain: Codec[Any], data: st.DataObject
) -> None:
    value = data.draw(st.from_type(kind))
    assert there_and_back(plain, value) == value


def test_a_life_is_the_same_when_it_comes_back() -> None:
    world = lived("lalbo3", seed=5, count=400)
    for (event, _), actions in zip(world.log, world.answers, strict=True):
        assert there_and_back(EVENTS, event) == event
        assert [there_and_back(ACTIONS, action) for action in actions] == actions


def test_plain_form_names_the_class_and_leaves_defaults_out() -> None:
    timer = SetTimer(2.0, DeadlinePassed(RequestId("r")))
    assert ACTIONS.to_plain(timer) == [
        "SetTimer",
        {"at_s": 2.0, "event": ["DeadlinePassed", {"request": "r"}]},
    ]
    loaded = ModelLoaded(GpuId("g0"), ModelId("bert"), float("inf"), Tier.HOST)
    assert EVENTS.to_plain(loaded) == [
        "ModelLoaded",
        {"gpu": "g0", "model": "bert", "load_s": "inf", "source": "host"},
    ]


def test_integer_is_a_number_of_seconds_when_one_is_wanted() -> None:
    policy = EVENTS.from_plain(["PolicySet", {"policy": "lb", "parameters": {"limit": 3}}])
    assert isinstance(policy, PolicySet)
    assert (policy.parameters, type(policy.parameters["limit"])) == ({"limit": 3.0}, float)


REFUSED: tuple[tuple[object, str], ...] = (
    (None, "None is no list"),
    ("SlotFreed", "no list"),
    (["SlotFreed"], "a list of 1 is not"),
    (["SlotFreed", None], "SlotFreed: None is no object"),
    (["SlotFreed", {"slot": "g0"}], "SlotFreed: SlotFreed lacks lease"),
    (["SlotFreed", {"slot": "g0", "lease": 1, "why": ""}], "SlotFreed has no 'why'"),
    (["SlotFreed", {"slot": "g0", "lease": "1"}], "SlotFreed.lease: '1' is not of kind int"),
    (["SlotFreed", {"slot": "g0", "lease": True}], "lease: True"),
    (["SlotFreed", {"slot": 0, "lease": 1}], "slot: 0"),
    (["SlotFreed", {"slot": "g0", "lease": 1.0}], "lease: 1.0"),
    (["SlotFreed", {1: 2, "slot": "g0", "lease": 1}], "SlotFreed has no 1"),
    (["EndLease", {"slot": "g0", "lease": 1, "reason": ""}], "nothing is called 'EndLease'"),
    ([["SlotFreed"], {}], "nothing is called"),
    (["GpuLost", {"gpu": "g0", "running": "perhaps"}], "running: 'perhaps' is none of"),
    (["RequestArrived", {"request": {"id": "r", "function": "f", "models": "m"}}], "models"),
    (["PolicySet", {"policy": "lb", "parameters": {"x": "nan"}}], "parameters.x: 'nan'"),
    (["PolicySet", {"policy": "lb", "parameters": {"x": float("nan")}}], "no number"),
    (["PolicySet", {"policy": "lb", "parameters": [["x", 1.0]]}], "no object"),
    (["ModelRegistered", {"model": {"id": "m", "load_s": {"host": 1}}}], "no list"),
    (["ModelRegistered", {"model": {"id": "m", "load_s": [["host"]]}}], "2 entries"),
    (
        ["ModelRegistered", {"model": {"id": "m", "load_s": [["host", 1], ["host", 2]]}}],
        "a key is there twice",
    ),
)


def test_value_is_refused_when_it_is_not_what_an_event_has() -> None:
    wrong = [
        (plain, taken)
        for plain, complaint in REFUSED
        if (taken := instead_of(BadValue, EVENTS.from_plain, plain, match=re.escape(complaint)))
    ]
    assert wrong == []


def test_complaint_is_short_when_the_value_is_not() -> None:
    for huge in ("x" * 1_000_000, ["SlotFreed", {"slot": "x" * 1_000_000, "lease": "y" * 10**6}]):
        with pytest.raises(BadValue) as refused:
            EVENTS.from_plain(huge)
        assert len(str(refused.value)) < 300


def test_order_is_refused_when_it_is_another_action() -> None:
    end = EndLease(SlotId("g0"), LeaseId(1), "released")
    assert ORDERS.from_plain(ORDERS.to_plain(end)) == end
    with pytest.raises(BadValue):
        ORDERS.from_plain(ACTIONS.to_plain(SetTimer(1.0, FREED)))


@given(
    plain=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda some: st.lists(some) | st.dictionaries(st.text(), some),
    )
)
def test_anything_is_refused_when_it_is_no_event(plain: object) -> None:
    for kind in (EVENTS, ACTIONS, REQUESTS, STATUSES, SNAPSHOTS):
        with pytest.raises(BadValue):
            kind.from_plain(plain)
