"""A function that takes lists of calls, through a whole stack: one lease and one run for a list."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from tests.kit.stacks import handlers
from tests.kit.stacks.stack import Rest, Stack, leases, stack
from tests.kit.waiting import wait_until

_TOGETHER = 4
_LISTS = """
import json
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2).eval().cuda()
def handle_batch(events, context):
    print("list of", len(events), flush=True)
    found = [json.loads(event.body) for event in events]
    with torch.no_grad():
        rows = model(torch.tensor(found, device="cuda")).cpu().tolist()
    return [answer(row, len(events)) for row in rows]
def answer(row, count):
    return {"row": row, "count": count}
"""
_ALONE = "\ndef handle(event, context):\n    return handle_batch([event], context)[0]\n"


class Batches(NamedTuple):
    """A stack with one GPU; the function, and the same for single calls."""

    up: Stack
    rest: Rest

    def calls(self, bodies: Sequence[object], name: str = "lists") -> list[httpx.Response]:
        """All at once: each is sent when the others are."""
        together = threading.Barrier(len(bodies))

        def call(body: object) -> httpx.Response:
            together.wait()
            return self.rest.call(name, json.dumps(body))

        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(call, bodies))

    def log(self) -> str:
        return self.rest.ask("GET", "/system/logs?name=lists&tail=500&follow=false").text


@pytest.fixture(scope="module")
def batches(environment: Mapping[str, str]) -> Iterator[Batches]:
    with stack(environment) as up:
        up.start("--devices", "cpu:1")
        rest = Rest(up)
        gpu = {"com.gpufaas.enabled": "true"}
        wishes = {
            "com.gpufaas.batch-handler": str(_TOGETHER),
            "com.gpufaas.batch-wait": "10s",  # so that lists are full, however slow the machine is
        }
        written = dict(handlers.write(up.work, "lists", _LISTS + _ALONE))
        rest.deploy("single", annotations=written | gpu)
        rest.deploy("lists", annotations=written | gpu | wishes)
        found = Batches(up, rest)
        _learn(found)
        yield found


def _learn(found: Batches) -> None:
    """Call until the gateway knows the function's models, and leases are for them."""

    def is_leased() -> bool:
        found.calls(_bodies(_TOGETHER))
        return bool(found.rest.metric("gpufaas_gateway_lease_seconds_count", result="hit"))

    wait_until(is_leased, "leases for the function's calls", instead=found.log)


def _bodies(count: int) -> list[list[float]]:
    return [[float(number), 1.0, 2.0, 3.0] for number in range(count)]


def _rows(answers: Sequence[httpx.Response]) -> list[list[float]]:
    return [[round(value, 4) for value in _json(answer)["row"]] for answer in answers]


def _json(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == httpx.codes.OK, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_calls_that_come_together_are_given_together_and_answered_each(batches: Batches) -> None:
    bodies = _bodies(_TOGETHER)
    found = batches.calls(bodies)
    assert [_json(answer)["count"] for answer in found] == [_TOGETHER] * _TOGETHER
    single = [batches.rest.call("single", json.dumps(body)) for body in bodies]
    assert _rows(found) == _rows(single)
    assert len({answer.headers["x-call-id"] for answer in found}) == _TOGETHER


def test_more_calls_than_a_list_takes_are_given_in_several_ones(batches: Batches) -> None:
    found = batches.calls(_bodies(3 * _TOGETHER))
    assert {_json(answer)["count"] for answer in found} == {_TOGETHER}


def test_one_lease_serves_all_calls_of_a_list_and_nothing_is_left(batches: Batches) -> None:
    wait_until(lambda: not leases(batches.up), "no lease is left of earlier calls")
    before = batches.up.scheduler.get("/cluster")["hits"]
    found = batches.calls(_bodies(_TOGETHER))
    assert {_json(answer)["count"] for answer in found} == {_TOGETHER}  # a list is of one lease
    wait_until(lambda: not leases(batches.up), "the lease is given back")
    # Each call is counted; so is a lease that one of them asked for before it joined the others.
    assert batches.up.scheduler.get("/cluster")["hits"] >= before + _TOGETHER


def test_poisoned_call_fails_alone(batches: Batches) -> None:
    good = _bodies(_TOGETHER - 1)
    found = batches.calls([*good, ["no number"] * 4])
    assert [answer.status_code for answer in found] == [200] * len(good) + [500]
    assert [_json(answer)["count"] for answer in found[:-1]] == [1] * len(good)
    wait_until(lambda: "each is made once more, alone" in batches.log(), "it is logged")


def test_metrics_count_lists_and_the_calls_in_them(batches: Batches) -> None:
    names = ("gpufaas_gateway_batched_calls_total", "gpufaas_gateway_batches_total")
    before = [batches.rest.metric(name, function_name="lists.openfaas-fn") for name in names]
    batches.calls(_bodies(_TOGETHER))
    after = [batches.rest.metric(name, function_name="lists.openfaas-fn") for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [_TOGETHER, 1.0]
