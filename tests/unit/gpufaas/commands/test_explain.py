"""`gpufaas explain` takes the id that callers have, whatever the call did."""

from typing import Any

import pytest

from gpufaas.commands.explain import call_text, explanation, latest_text
from gpufaas.errors import CommandError
from gpufaas.remote.gateway_api import GatewayApi
from gpufaas.remote.http_request import http_url
from gpufaas.remote.scheduler_api import SchedulerApi


class FakeScheduler(SchedulerApi):
    """One that remembers these requests."""

    def __init__(self, *requests: str) -> None:
        super().__init__((), "")
        self._requests = requests

    def get(self, path: str, **query: object) -> Any:
        del query
        if path == "/explain":
            return list(self._requests)
        request = path.removeprefix("/explain/")
        if request not in self._requests:
            raise CommandError(f"no request among the latest: {request}")
        return {"request": request}


class FakeGateway(GatewayApi):
    """One that remembers the call `c1`, whose spans have these attributes."""

    def __init__(self, *attributes: dict[str, Any]) -> None:
        super().__init__(http_url("http://gateway", "gateway"), "")
        self._spans = [{"name": "call f.n", "attributes": one} for one in ({}, *attributes)]

    def get(self, path: str) -> Any:
        if path != "/system/traces/c1":
            raise CommandError("call is unknown")
        return {"spans": self._spans}


@pytest.mark.parametrize("request_id", ["c1", "c1~2af0", "n/f/session/1"])
def test_call_is_explained_by_its_id_whatever_the_request_was_called(request_id: str) -> None:
    gateway = FakeGateway({"gpufaas.request": request_id}, {"gpufaas.request": "forgotten"})
    told = explanation(FakeScheduler(request_id), lambda: gateway, "c1")
    assert told == {"requests": [{"request": request_id}]}


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        (
            {"gpufaas.local": "its graph is being traced"},
            "own processor: its graph is being traced",
        ),
        ({"gpufaas.lease": 7, "gpufaas.gpu": "vm/cpu:0"}, "on vm/cpu:0 under lease 7"),
        ({"gpufaas.lease": 0}, "it used no GPU"),
    ],
)
def test_call_without_a_request_of_its_own_says_where_it_ran(
    attributes: dict[str, Any], text: str
) -> None:
    told = call_text(explanation(FakeScheduler(), lambda: FakeGateway(attributes), "c1"))
    assert told.startswith("call f.n\n")
    assert text in told


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        (
            503,
            "it does not start: KeyError",
            ["it failed, status 503: it does not start: KeyError"],
        ),
        (429, "its queue is full", ["it failed, status 429: its queue is full"]),
        (200, "f broke off", ["it failed, status 200: f broke off"]),
        (502, "status 502", ["it was answered 502"]),
        (404, "", []),
    ],
)
@pytest.mark.parametrize(
    ("where", "told_where"),
    [
        ({}, "it used no GPU"),
        ({"gpufaas.lease": 7}, "on its GPU under lease 7, which stood from an earlier call"),
    ],
)
def test_call_that_failed_says_how_wherever_it_ran(
    where: dict[str, Any], told_where: str, status: int, error: str, told: list[str]
) -> None:
    attributes = {"http.response.status_code": status, **where}
    text = call_text({"spans": [{"name": "call f", "attributes": attributes, "error": error}]})
    assert [line.strip() for line in text.splitlines()] == ["call f", told_where, *told]


def test_listing_of_no_request_says_what_makes_one() -> None:
    assert latest_text([]) == "no request yet: call a function that uses a GPU"


def test_call_that_nobody_knows_is_refused_with_what_both_say() -> None:
    with pytest.raises(CommandError, match=r"no request among .*; and the gateway: call is unkn"):
        explanation(FakeScheduler(), FakeGateway, "c2")


def test_no_gateway_is_looked_for_when_the_scheduler_knows_the_request() -> None:
    def gateway() -> GatewayApi:
        raise CommandError("nothing is up")

    told = explanation(FakeScheduler("r1"), gateway, "r1")
    assert told == {"requests": [{"request": "r1"}]}
    with pytest.raises(CommandError, match=r"no request among .*; and the gateway: nothing is up"):
        explanation(FakeScheduler(), gateway, "r1")


def test_latest_requests_are_shown_with_their_age_and_function() -> None:
    named = {"function": "f.n", "request": "r\x1b1", "arrived_ago_s": 1.5}
    assert latest_text([named]) == "      1.5 s ago  f.n  r?1"
