"""A call's path as text."""

from typing import Any

import pytest

from gpufaas.cli import main
from gpufaas.commands.trace import latest_text, request_trace, trace_text
from gpufaas.errors import CommandError
from gpufaas.remote.gateway_api import GatewayApi
from gpufaas.remote.http_request import http_url
from gpufaas.remote.scheduler_api import SchedulerApi

TRACE = 32 * "a"


def a_span(
    name: str, number: int, parent: int, begin_ms: float, took_ms: float, **more: Any
) -> Any:
    begin_ns = int(1e18 + begin_ms * 1e6)
    return {
        "trace_id": TRACE,
        "span_id": f"{number:016x}",
        "parent_id": f"{parent:016x}",
        "name": name,
        "service": "gpufaas-gateway",
        "begin_ns": begin_ns,
        "end_ns": begin_ns + int(took_ms * 1e6),
        "attributes": {},
    } | more


LEASE = a_span("lease", 2, 1, 1, 2, attributes={"gpufaas.request": "r0", "gpufaas.hit": False})
CALL = a_span("call f", 1, 99, 0, 10, attributes={"http.response.status_code": 200})


class FakeGateway(GatewayApi):
    def __init__(self, *spans: Any) -> None:
        super().__init__(http_url("http://gateway", "gateway"), "")
        self.spans = list(spans)

    def get(self, path: str) -> Any:
        if path == "/system/traces":
            calls = ("12345678-a", "abcdefgh-1", "abcdefgh-2")
            return {"calls": [{"call_id": each} for each in calls]}
        if path not in {"/system/traces/c%2F1", "/system/traces/12345678-a"}:
            raise CommandError("the call is unknown")
        return {"spans": self.spans}


class FakeScheduler(SchedulerApi):
    def __init__(self, *spans: Any) -> None:
        super().__init__((), "")
        self.spans = list(spans)

    def get(self, path: str, **query: object) -> Any:
        assert (path, query) == ("/traces/r0", {})
        if not self.spans:
            raise CommandError("it is forgotten")
        return {"spans": self.spans}


class NoRequests(SchedulerApi):
    def __init__(self) -> None:
        super().__init__((), "")


def test_spans_of_the_scheduler_are_below_the_lease_that_asked_for_them() -> None:
    queue = a_span("queue", 4, 3, 2, 1, service="gpufaas-scheduler", trace_id=32 * "0")
    schedule = a_span("schedule", 3, 0, 2, 1, service="gpufaas-scheduler", trace_id=32 * "0")
    story = request_trace(FakeGateway(CALL, LEASE), FakeScheduler(schedule, queue), "c/1")
    assert list(trace_text(story)) == [
        f"call c/1, trace {TRACE}",
        "       began         took",
        "    0.000 ms    10.000 ms  call f [gateway] status 200",
        "    1.000 ms     2.000 ms    lease [gateway] request r0, hit: no",
        "    2.000 ms     1.000 ms      schedule [scheduler]",
        "    2.000 ms     1.000 ms        queue [scheduler]",
    ]


def test_requests_that_the_scheduler_has_forgotten_are_named() -> None:
    story = request_trace(FakeGateway(CALL, LEASE), FakeScheduler(), "c/1")
    missing = "(missing: request r0: it is forgotten)"
    assert list(trace_text(story))[-1] == missing


def test_foreign_names_reach_no_terminal_as_they_are() -> None:
    evil = CALL | {"name": "call\x1b[2J\r\n", "attributes": {"gpufaas.call_id": "\x9b"}}
    story = request_trace(FakeGateway(evil), FakeScheduler(), "c/1")
    assert all(line.isprintable() for line in trace_text(story))


def test_request_is_traced_by_its_own_id() -> None:
    queue = a_span("queue", 4, 3, 2, 1, service="gpufaas-scheduler")
    story = request_trace(FakeGateway(CALL), FakeScheduler(queue), "r0")
    assert story == {"call_id": "r0", "spans": [queue], "missing": []}


def test_call_is_traced_by_the_beginning_of_its_id_if_that_is_one_call() -> None:
    assert request_trace(FakeGateway(CALL), FakeScheduler(), "12345678")["spans"] == [CALL]
    expected = "an X-Call-Id or at least its first 8 characters are expected"
    for given, why in (
        ("abcdefgh", f"2 of the latest calls begin so, {expected}"),
        ("1234", f"1 of the latest calls begin so, {expected}"),
        ("feelings", expected),
    ):
        with pytest.raises(CommandError, match=f"^the call is unknown; {why}$"):
            request_trace(FakeGateway(CALL), NoRequests(), given)


def test_call_that_is_listed_and_gone_is_unknown() -> None:
    with pytest.raises(CommandError, match="the call is unknown"):
        request_trace(FakeGateway(CALL), NoRequests(), "abcdefgh-1")


def test_failure_is_shown() -> None:
    failed = a_span("call f", 1, 0, 0, 1, error="status 502")
    story = request_trace(FakeGateway(failed), FakeScheduler(), "c/1")
    assert list(trace_text(story))[-1].endswith("call f [gateway] FAILED: status 502")


@pytest.mark.parametrize("parent", [1, 2])
def test_spans_in_a_circle_are_shown_once(parent: int) -> None:
    """As of a function whose graph call has the id of what it is below."""
    circle = [a_span("handler", 2, 1, 1, 2), a_span("graph call", 2, parent, 2, 1)]
    lines = list(trace_text(request_trace(FakeGateway(CALL, *circle), FakeScheduler(), "c/1")))
    assert sum("graph call" in line for line in lines) == 1
    assert len(lines) == 2 + 3


def test_spans_that_no_root_leads_to_are_shown() -> None:
    circle = [a_span("one", 2, 3, 1, 2), a_span("other", 3, 2, 2, 1)]
    lines = list(trace_text(request_trace(FakeGateway(CALL, *circle), FakeScheduler(), "c/1")))
    assert [line.split()[4] for line in lines[2:]] == ["call", "one", "other"]


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "http://127.0.0.1:1"])
def test_server_that_is_no_gateway_is_reported(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("GPUFAAS_STATE", str(tmp_path))
    assert main(["trace", "c1", "--gateway", url]) == 2
    assert url in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "failed", "told"),
    [(200, {"failed": True}, "200, broke off"), (200, {}, "200"), (503, {"failed": True}, "503")],
)
def test_listing_tells_the_call_that_broke_off_when_its_status_had_been_sent(
    status: int, failed: dict[str, bool], told: str
) -> None:
    call = {"call_id": "c1", "function": "f", "status": status, "took_s": 1, "running": False}
    assert latest_text({"calls": [call | failed]}) == f"c1  f  {told}  1000.000 ms"


def test_listing_of_no_call_says_what_makes_one() -> None:
    assert latest_text({"calls": []}) == "no call yet: call a function"


@pytest.mark.parametrize("command", ["trace", "explain"])
def test_empty_id_is_refused_before_anybody_is_asked(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, ""])
    assert "an X-Call-Id, or how that begins, is expected" in capsys.readouterr().err
