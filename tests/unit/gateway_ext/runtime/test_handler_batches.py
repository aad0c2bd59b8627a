"""A handler that takes a list, in a real process: who is called together, and each one's answer."""

import base64
import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway_ext.calls.learned import thread_wait
from gateway_ext.runtime import handler_module
from gateway_ext.runtime.batches import handlers_of_lists
from gateway_ext.tracing.tracer import read_report
from tests.kit.processes.batch_runtime import (
    HANDLER,
    answered_on,
    answers,
    posted,
    sent_by,
    served,
)
from tests.kit.processes.runtime_process import runtime

SHORT = """
def handle_batch(events, context):
    print("called with", len(events))
    return ["one"] * (len(events) - 1) or {"not": "a list"}
"""
# The main thread makes the server ready, and goes on when the gate is there.
READY_FOR_LONG = """
import sys
(server,) = (one for name, one in sys.modules.items() if name.endswith("runtime.server"))
usual = server.FunctionServer.ready
def ready(self, handler):
    usual(self, handler)
    while not Path("{gate}").exists():
        time.sleep(0.01)
server.FunctionServer.ready = ready
"""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as found:
        yield found


def test_handler_is_refused_when_no_call_of_it_could_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "handler.py").write_text("def handle_batch(events): ...\n")
    why = r"^handle_batch\(events\) takes 1 argument: handle_batch\(events, context\) is expected$"
    with pytest.raises(handler_module.NoHandler, match=why):
        handler_module.load(tmp_path, [handlers_of_lists({})])


# -- who is called together ---------------------------------------------------------------------


def test_calls_are_given_together_and_each_has_its_own_answer(pool: ThreadPoolExecutor) -> None:
    with served(HANDLER, 4) as running:
        found = answers(pool, running, "a", "b", "c", "d")
        texts = [json.loads(each.body) for each in found]
        assert [(each["body"], each["count"]) for each in texts] == [(k, 4) for k in "abcd"]
        assert running.written() == "list ['a', 'b', 'c', 'd']\n"


def test_list_has_no_more_calls_than_its_most(pool: ThreadPoolExecutor) -> None:
    with served(HANDLER, 2) as running:
        found = answers(pool, running, "a", "b", "c", "d")
        assert [json.loads(each.body)["count"] for each in found] == [2, 2, 2, 2]


def test_what_is_there_is_taken_without_a_wait(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with served(HANDLER, 8, "0") as running:
        first = posted(pool, running, "first", **{"X-Gate": str(gate)})
        running.until_written("list ['first']")
        others = [sent_by(running, body) for body in (b"a", b"b", b"c")]
        running.call("/_/ready", method="GET")  # what came before has been read
        gate.touch()
        assert json.loads(first[0].result().body)["count"] == 1
        assert {json.loads(answered_on(each).body)["count"] for each in others} == {3}


def test_call_that_waited_for_others_in_vain_is_served_alone() -> None:
    with served(HANDLER, 4, "50ms") as running:
        assert json.loads(running.call(body=b"a").body)["count"] == 1


def test_calls_of_two_leases_are_not_in_one_list(pool: ThreadPoolExecutor) -> None:
    with served(HANDLER, 2) as running:
        one = posted(pool, running, "a", "b", **{"X-Gpu-Lease": "one"})
        two = posted(pool, running, "c", "d", **{"X-Gpu-Lease": "two"})
        assert [json.loads(each.result().body)["count"] for each in one + two] == [2, 2, 2, 2]
        assert "list ['a', 'b']" in running.written()
        assert "list ['c', 'd']" in running.written()


def test_calls_that_share_a_lease_by_tokens_of_their_own_are_in_one_list(
    pool: ThreadPoolExecutor,
) -> None:
    def token(request: str, lease: int) -> str:
        claims = {"lease": lease, "request": request, "function": "t/f", "node": "n0"}
        return f"{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()}.mac"

    with served(HANDLER, 2) as running:
        found = []
        for body, lease in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
            found += posted(pool, running, body, **{"X-Gpu-Lease": token(body, lease)})
        assert [json.loads(each.result().body)["count"] for each in found] == [2, 2, 2, 2]
        assert "list ['a', 'c']" in running.written()
        assert "list ['b', 'd']" in running.written()


def test_batches_of_two_leases_run_at_the_same_time(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with served(HANDLER, 2, "0") as running:
        held = posted(pool, running, "a", **{"X-Gpu-Lease": "one", "X-Gate": str(gate)})
        running.until_written("list ['a']")
        assert answers(pool, running, "b", **{"X-Gpu-Lease": "two"})[0].status == 200
        gate.touch()
        assert held[0].result().status == 200


def test_module_with_both_is_given_lists_only_if_the_deployment_asks(
    pool: ThreadPoolExecutor,
) -> None:
    both = HANDLER + "\ndef handle(event, context):\n    return 'single'\n"
    with runtime(both) as running:
        assert running.call(body=b"a").body == b"single"
    with served(both, 2) as running:
        assert json.loads(answers(pool, running, "a", "b")[0].body)["count"] == 2


def test_handler_of_lists_gets_one_call_at_a_time_unless_the_deployment_asks(
    pool: ThreadPoolExecutor,
) -> None:
    with runtime(HANDLER) as running:
        assert "com.gpufaas.batch-handler" in running.written()
        found = answers(pool, running, "a", "b", "c")
        assert [json.loads(each.body)["count"] for each in found] == [1, 1, 1]


def test_process_ends_when_the_deployment_asks_for_lists_and_the_handler_takes_none() -> None:
    single = "def handle(event, context):\n    return 'x'\n"
    with served(single, 2, ready=False) as running:
        assert running.process.wait() == 1
        assert "has no function `handle_batch`" in running.written()


# -- one call's own error -----------------------------------------------------------------------


def test_exception_in_the_list_is_one_calls_own(pool: ThreadPoolExecutor) -> None:
    with served(HANDLER, 3) as running:
        good, bad, other = answers(pool, running, "a", "error", "status")
        assert (good.status, bad.status, other.status) == (200, 500, 418)
        assert bad.body == b"the function raised KeyError\n"
        assert (other.body, other.headers["X-Mine"]) == (b"teapot", "yes")
        running.until_written("KeyError: 'only mine'")
        assert running.written().count("list [") == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("stream", "answered with generator"), ("unsendable", "cannot answer with object")],
)
def test_answer_that_cannot_be_sent_fails_its_own_call_only(
    pool: ThreadPoolExecutor, kind: str, reason: str
) -> None:
    with served(HANDLER, 2) as running:
        good, bad = answers(pool, running, "a", kind)
        assert (good.status, bad.status) == (200, 500)
        running.until_written(reason)


def test_poisoned_call_fails_alone_and_the_others_are_made_once_more(
    pool: ThreadPoolExecutor,
) -> None:
    with served(HANDLER, 3) as running:
        good, bad, other = answers(pool, running, "a", "poison", "b")
        assert (good.status, bad.status, other.status) == (200, 500, 200)
        assert json.loads(good.body)["count"] == 1
        lines = [line for line in running.written().splitlines() if line.startswith("list")]
        assert sorted(lines) == sorted(
            ["list ['a', 'b', 'poison']", "list ['a']", "list ['b']", "list ['poison']"]
        )
        assert "in a batch of 3 calls; each is made once more, alone" in running.written()


def test_nothing_is_repeated_where_the_deployment_forbids_it(pool: ThreadPoolExecutor) -> None:
    with served(HANDLER, 3, GPUFAAS_BATCH_REPEATS="0") as running:
        found = answers(pool, running, "a", "poison", "b")
        assert [each.status for each in found] == [500, 500, 500]
        assert running.written().count("list [") == 1


def test_single_call_that_fails_is_not_repeated() -> None:
    with served(HANDLER, 4, "0") as running:
        assert running.call(body=b"poison").status == 500
        assert running.written().count("list [") == 1


def test_wrong_number_of_answers_fails_all_and_repeats_none(pool: ThreadPoolExecutor) -> None:
    with served(SHORT, 3) as running:
        assert [each.status for each in answers(pool, running, "a", "b", "c")] == [500] * 3
        running.until_written("handle_batch returned 2 answers for 3 calls")
        assert running.written().count("called with") == 1


def test_what_is_no_list_is_an_error() -> None:
    with served(SHORT, 1) as running:
        assert running.call(body=b"a").status == 500
        running.until_written("handle_batch returned dict, not a list of 1 answers")


# -- the end, reports, templates ----------------------------------------------------------------


def test_all_that_wait_are_served_when_the_process_is_to_end(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with served(HANDLER, 2) as running:
        held = posted(pool, running, "a", "b", **{"X-Gate": str(gate)})
        running.until_written("list ['a', 'b']")
        waiting = sent_by(running, b"c")  # alone: it would wait for a minute
        running.call("/_/ready", method="GET")  # what came before has been read
        running.process.send_signal(signal.SIGTERM)
        gate.touch()
        assert [each.result().status for each in held] == [200, 200]
        assert answered_on(waiting).status == 200
        assert running.process.wait() == 0


def test_call_that_waits_for_others_is_served_at_once_when_the_process_is_to_end() -> None:
    with served(HANDLER, 2) as running:
        waiting = sent_by(running, b"a")
        running.call("/_/ready", method="GET")  # what came before has been read
        running.process.send_signal(signal.SIGTERM)
        assert answered_on(waiting).status == 200
        assert running.process.wait() == 0


def test_call_is_served_when_the_process_is_to_end_in_the_moment_of_its_readiness(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    with served(HANDLER + READY_FOR_LONG.format(gate=gate), 2) as running:
        waiting = sent_by(running, b"a")
        running.call("/_/ready", method="GET")  # what came before has been read
        running.process.send_signal(signal.SIGTERM)
        assert answered_on(waiting).status == 200
        gate.touch()
        assert running.process.wait() == 0


def test_reports_say_how_many_calls_were_in_the_list(pool: ThreadPoolExecutor) -> None:
    with served(HANDLER, 3) as running:
        for answer in answers(pool, running, "a", "b", "error"):
            report = answer.headers["X-Gpu-Trace"].encode()
            handler = read_report(report).handler
            assert handler is not None
            assert handler.number("b") == 3
            wait = thread_wait(report)
            assert wait is not None
            assert wait.at_a_time == 3


def test_example_calls_are_made_alone_and_together() -> None:
    example = json.dumps([{"body": "a"}, {"body": "b"}])
    with served(HANDLER, 2, "0", workers=2, example=example) as running:
        assert running.call(body=b"x").status == 200
        lines = running.written().splitlines()
        assert lines[:3] == ["list ['a']", "list ['b']", "list ['a', 'b']"]
