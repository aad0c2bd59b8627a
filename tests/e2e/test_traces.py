"""Traces through real processes: to a collector, and as `gpufaas trace` shows them."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from gpufaas.errors import CommandError
from tests.kit.fakes.trace_collector import Collector, Kept, collecting
from tests.kit.stacks import handlers
from tests.kit.stacks.listening import listening
from tests.kit.stacks.load import Asked, warm
from tests.kit.stacks.stack import Rest, Stack, stack
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.group("traces", seconds=30)

TRACE, CALLER = 32 * "a", 16 * "b"
STREAMING = """
def handle(event, context):
    return (f"{number}\\n" for number in range(3))
"""
ECHO = """
def handle(event, context):
    return event.headers.get("traceparent", "none") + " " + event.headers.get("tracestate", "none")
"""


@dataclass(frozen=True)
class Traced:
    """A stack whose processes tell a collector, and log JSON."""

    stack: Stack
    rest: Rest
    collector: Collector

    def spans(self, trace_id: str, count: int) -> list[Kept]:
        """Those of a trace, once as many have come."""

        def found() -> list[Kept]:
            """Spans are sent again where the collector, which is in this process, answers late."""
            came = self.collector.of(trace_id)
            return [span for at, span in enumerate(came) if span not in came[:at]]

        wait_until(lambda: len(found()) >= count, "spans", instead=lambda: _shown(found()))
        time.sleep(0.2)
        return found()

    def trace(self, call_id: str) -> Any:
        """`gpufaas trace --json`, and in words."""
        secrets = str(self.stack.state / "secrets")
        secret = str(self.stack.state / "secret")
        command = ("trace", call_id, "--gateway", self.stack.url, "--secrets-dir", secrets)
        where = ("--scheduler", self.stack.scheduler_url, "--secret-file", secret)
        found = self.stack.run(*command, *where, "--json")
        assert found.returncode == 0, found.stderr
        words = self.stack.run(*command, *where)
        assert words.returncode == 0, words.stderr
        return json.loads(found.stdout), words.stdout


@pytest.fixture(scope="module")
def traced(environment: Mapping[str, str]) -> Iterator[Traced]:
    """One for all of these tests."""
    with collecting() as collector:
        telemetry = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "GPUFAAS_LOG_FORMAT": "json"}
        with stack({**environment, **telemetry}) as found:
            found.start("--emulate-load", "0.2", "--emulate-run", "0.02")
            rest = Rest(found)
            for name, text, more in (
                ("echo", ECHO, handlers.PLAIN),
                ("stream", STREAMING, handlers.PLAIN),
                ("model", handlers.ON_GPU, {"com.gpufaas.enabled": "true"}),
            ):
                annotations = dict(handlers.write(found.work, name, text)) | dict(more)
                rest.deploy(name, annotations=annotations)
            yield Traced(found, rest, collector)


def _shown(spans: list[Kept]) -> str:
    names = {span.span_id: span.name for span in spans}
    lines = [f"{span.name} < {names.get(span.parent_id, span.parent_id)}" for span in spans]
    return "\n".join(lines)


def _parents(spans: list[Kept]) -> dict[str, str]:
    """The name of each span's parent, by its name."""
    names = {span.span_id: span.name for span in spans}
    return {span.name: names.get(span.parent_id, span.parent_id) for span in spans}


def _parent(trace_id: str = TRACE, flags: str = "01") -> Mapping[str, str]:
    return {"traceparent": f"00-{trace_id}-{CALLER}-{flags}", "tracestate": "vendor=x"}


def test_function_is_told_of_its_trace_when_the_client_says_one(traced: Traced) -> None:
    answer = traced.rest.call("echo", headers=_parent(32 * "1"))
    parent, state = answer.text.split(" ")
    assert parent.startswith(f"00-{32 * '1'}-")
    assert parent.endswith("-01")
    assert CALLER not in parent
    assert state == "vendor=x"
    spans = traced.spans(32 * "1", 5)
    assert _parents(spans) == {
        "call echo.openfaas-fn": CALLER,
        "receive": "call echo.openfaas-fn",
        "wait for an instance": "call echo.openfaas-fn",
        "function": "call echo.openfaas-fn",
        "handler": "function",
    }
    (function,) = (span for span in spans if span.name == "function")
    assert function.span_id == parent.split("-")[2]


@pytest.mark.parametrize("header", ["", "00-xyz-1-01", f"00-{32 * '0'}-{CALLER}-01", "ff"])
def test_trace_is_made_anew_when_the_client_says_none_that_is_valid(
    traced: Traced, header: str
) -> None:
    headers = {"traceparent": header, "tracestate": "lost=1"} if header else {}
    parent, state = traced.rest.call("echo", headers=headers).text.split(" ")
    version, trace_id, span_id, flags = parent.split("-")
    assert (version, flags, len(trace_id), len(span_id)) == ("00", "01", 32, 16)
    assert trace_id != 32 * "0"
    assert state == "none"
    assert len(traced.spans(trace_id, 5)) == 5


def test_nobody_is_told_of_a_trace_when_the_client_does_not_sample_it(traced: Traced) -> None:
    answer = traced.rest.call("echo", headers=_parent(32 * "2", "00"))
    assert answer.text.split(" ")[0].endswith("-00")
    traced.rest.call("echo", headers=_parent(32 * "3"))
    traced.spans(32 * "3", 5)
    assert traced.collector.of(32 * "2") == []
    story, _ = traced.trace(answer.headers["x-call-id"])
    assert {span["name"] for span in story["spans"]} >= {"function", "handler"}


def test_handler_is_timed_to_its_end_when_it_streams(traced: Traced) -> None:
    traced.rest.call("stream", headers=_parent(32 * "4"))
    assert "handler" in _parents(traced.spans(32 * "4", 5))


def test_trace_is_one_connected_tree_when_a_gpu_is_used(traced: Traced) -> None:
    warm(traced.stack, traced.rest, Asked("model"))
    wait_until(lambda: not _leased(traced), "the gateway to give its leases back")
    answer = traced.rest.call("model", headers=_parent())
    traced.spans(TRACE, 15)
    story, words = traced.trace(answer.headers["x-call-id"])
    assert story["missing"] == []
    # And those of the shim's own lease, if it had to ask for one.
    spans = traced.spans(TRACE, len(story["spans"]))
    known = {span.span_id for span in spans} | {CALLER}
    assert all(span.parent_id in known for span in spans), _shown(spans)
    names = {span.span_id: span.name for span in spans}
    parents = {
        span.name: names.get(span.parent_id, span.parent_id)
        for span in spans
        if span.service != "gpufaas-shim"
    }
    assert parents == {
        "call model.openfaas-fn": CALLER,
        "receive": "call model.openfaas-fn",
        "wait for an instance": "call model.openfaas-fn",
        "lease": "call model.openfaas-fn",
        "schedule": "lease",
        "queue": "schedule",
        "decision": "schedule",
        "held": "schedule",
        "function": "call model.openfaas-fn",
        "handler": "function",
        "wait for the GPU": "graph call",
        "inputs": "graph call",
        "compute": "graph call",
        "outputs": "graph call",
    }
    graphs = [span for span in spans if span.name == "graph call"]
    assert len(graphs) == 1, _shown(spans)
    (graph,) = graphs
    (handler,) = (span for span in spans if span.name == "handler")
    (compute,) = (span for span in spans if span.name == "compute")
    assert graph.parent_id == handler.span_id
    assert compute.end_ns - compute.begin_ns >= 20_000_000  # the emulated run
    assert handler.begin_ns <= graph.begin_ns <= compute.begin_ns
    assert compute.end_ns <= graph.end_ns <= handler.end_ns

    assert {span["span_id"] for span in story["spans"]} == {span.span_id for span in spans}
    tree = {span["span_id"]: span["parent_id"] for span in story["spans"]}
    assert tree == {span.span_id: span.parent_id for span in spans}
    assert "compute [worker]" in words


def test_trace_is_whole_when_an_earlier_call_left_its_lease(traced: Traced) -> None:
    warm(traced.stack, traced.rest, Asked("model"))
    rounds, spans = count(), list[Kept]()

    def is_kept() -> bool:
        """Whether the last call came in time for the lease of the one before it."""
        of_round = 29 * "c" + f"{next(rounds):02x}"
        for number in range(8):  # a lease that was kept in vain makes the next ones not stand
            trace = f"{of_round}{number:x}"
            traced.rest.call("model", headers=_parent(trace[::-1]))
            traced.rest.call("model", headers=_parent(trace))
        spans[:] = traced.spans(f"{of_round}7", 14)
        (decision,) = (span for span in spans if span.name == "decision")
        return bool(decision.attributes["gpufaas.rule"] == "its caller kept this lease")

    wait_until(is_kept, "a lease is kept", instead=lambda: _shown(spans))
    assert _parents(spans)["held"] == _parents(spans)["queue"] == "schedule"
    assert _parents(spans)["schedule"] == "lease"
    assert _parents(spans)["compute"] == "graph call"


def test_load_is_shown_when_a_request_waited_for_it(traced: Traced) -> None:
    model = _model_of(traced)
    wait_until(lambda: _leaves(traced, model), "the model to leave")
    answer = traced.rest.call("model", headers=_parent(32 * "6"))
    assert answer.status_code == 200, answer.text
    spans = traced.spans(32 * "6", 17)
    (load,) = (span for span in spans if span.name == "load")
    assert _parents(spans)["load"] == "held"
    assert load.service == "gpufaas-gpu-manager"
    assert load.end_ns - load.begin_ns >= 200_000_000  # the emulated load
    (held,) = (span for span in spans if span.name == "held")
    assert "gpufaas.expected_load_s" in held.attributes


def test_all_tries_and_the_callback_belong_to_the_trace_when_a_call_is_async(
    traced: Traced,
) -> None:
    with listening() as callback:
        answer = traced.rest.http.post(
            "/async-function/echo", headers={"x-callback-url": callback.url, **_parent(32 * "7")}
        )
        posted = callback.next()
    assert answer.status_code == 202
    spans = traced.spans(32 * "7", 7)
    parents = _parents(spans)
    assert parents["queue echo.openfaas-fn"] == CALLER
    assert parents["call echo.openfaas-fn"] == "queue echo.openfaas-fn"
    assert parents["callback echo.openfaas-fn"] == "queue echo.openfaas-fn"
    (sent,) = (span for span in spans if span.name.startswith("callback"))
    assert posted.headers["traceparent"] == f"00-{32 * '7'}-{sent.span_id}-01"
    assert posted.headers["tracestate"] == "vendor=x"
    _, words = traced.trace(answer.headers["x-call-id"])
    assert "callback echo.openfaas-fn" in words


def test_call_that_is_not_known_is_said_so(traced: Traced) -> None:
    secrets = str(traced.stack.state / "secrets")
    found = traced.stack.run(
        "trace", "no-such-call", "--gateway", traced.stack.url, "--secrets-dir", secrets
    )
    assert found.returncode == 2
    assert "call no-such-call is unknown: this gateway remembers" in found.stderr


def test_lines_are_json_with_call_and_trace_when_asked_for(traced: Traced) -> None:
    unreadable = []
    for log in sorted((traced.stack.state / "logs").glob("*.log")):
        whole = log.read_text().rpartition("\n")[0]  # what follows is still being written
        for line in whole.splitlines():
            try:
                assert {"time", "level", "logger", "message"} <= json.loads(line).keys()
            except ValueError:
                unreadable.append((log.name, line))
    assert not [each for each in unreadable if each[0] != "etcd.log"]


def _leased(traced: Traced) -> bool:
    """Whether some lease is in force."""
    gpus = traced.stack.scheduler.get("/cluster")["gpus"]
    return any(slot["leases"] for gpu in gpus for slot in gpu["slots"])


def _leaves(traced: Traced, model: str) -> bool:
    """Whether it was evicted everywhere: it is in use until the last call's lease has ended."""
    try:
        for gpu in traced.stack.scheduler.get("/cluster")["gpus"]:
            if any(each["model"] == model for each in gpu["residents"]):
                traced.stack.scheduler.post(f"/models/{model}/evict", gpu=gpu["id"])
    except CommandError:
        return False
    return True


def _model_of(traced: Traced) -> str:
    models = {
        each["model"]
        for gpu in traced.stack.scheduler.get("/cluster")["gpus"]
        for each in gpu["residents"]
    }
    assert len(models) == 1, models
    found: str = models.pop()
    return found
