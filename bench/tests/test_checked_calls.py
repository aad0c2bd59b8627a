"""Answers are compared with what torch computes from the same weights."""

import json

import pytest

from bench.gateway.checked_calls import KSERVE_FORM, bodies, computing_calls, empty_calls
from bench.measure.peers.two_layers import numbers_of, scores, two_layers
from bench.measure.report import MeasurementFailed


def an_answer(number: int, seed: int = 0, more: float = 0.0) -> bytes:
    found = scores(two_layers(seed), numbers_of(bodies()[number]))
    return json.dumps({"scores": [score + more for score in found]}).encode()


def test_right_answers_pass_the_check() -> None:
    calls = computing_calls({0: "/f"})

    calls.check([(number, 200, an_answer(number)) for number in range(len(calls.calls))])


@pytest.mark.parametrize(
    "wrong",
    [
        an_answer(0, more=0.001),
        an_answer(1),
        an_answer(0, seed=1),
        b'{"scores": []}',
        b'{"scores": null}',
        b"[]",
        b"hello",
    ],
)
def test_check_fails_for_any_other_answer(wrong: bytes) -> None:
    calls = computing_calls({0: "/f"})

    with pytest.raises(MeasurementFailed, match="call 0 is wrong"):
        calls.check([(1, 200, an_answer(1)), (0, 200, wrong)])


def test_calls_of_functions_alternate_and_are_checked_against_their_own_weights() -> None:
    calls = computing_calls({1: "/a", 2: "/b"})

    assert [call.split(b" ", 2)[1] for call in calls.calls[:4]] == [b"/a", b"/b", b"/a", b"/b"]
    calls.check([(0, 200, an_answer(0, seed=1)), (1, 200, an_answer(0, seed=2))])
    with pytest.raises(MeasurementFailed, match="call 1 is wrong"):
        calls.check([(1, 200, an_answer(0, seed=1))])


def test_check_passes_over_refusals_but_fails_where_no_call_succeeded() -> None:
    calls = empty_calls("/f")

    calls.check([(0, 429, b"busy"), (0, 200, b'{"hello": "hello"}')])
    with pytest.raises(MeasurementFailed, match="none of 1 calls succeeded"):
        calls.check([(0, 429, b"busy")])
    with pytest.raises(MeasurementFailed, match="call 0 is wrong"):
        calls.check([(0, 200, b"goodbye")])


def test_kserve_calls_carry_the_same_numbers_and_are_checked_alike() -> None:
    calls = computing_calls({0: "/f"}, KSERVE_FORM)
    sent = json.loads(calls.calls[0].partition(b"\r\n\r\n")[2])["inputs"][0]
    answer = {"outputs": [{"name": "scores", "data": json.loads(an_answer(0))["scores"]}]}

    assert (sent["shape"], sent["data"]) == ([1, 16], numbers_of(bodies()[0]))
    calls.check([(0, 200, json.dumps(answer).encode())])
    for wrong in (an_answer(0), b'{"outputs": []}'):
        with pytest.raises(MeasurementFailed, match="call 0 is wrong"):
            calls.check([(0, 200, wrong)])


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = two_layers(3), two_layers(3), two_layers(4)

    numbers = numbers_of(bodies()[0])
    assert scores(first, numbers) == scores(again, numbers) != scores(other, numbers)
