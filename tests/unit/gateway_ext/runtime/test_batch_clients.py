"""Calls of a list whose clients leave, that are late or too large; lists for a coroutine."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.places import ACTIVATE
from tests.kit.processes.batch_runtime import HANDLER, answers, posted, sent_by, served
from tests.kit.waiting import wait_until

ASYNC = """
import asyncio
async def handle_batch(events, context):
    print("list of", len(events))
    try:
        await asyncio.sleep(60 if events[0].body == b"sleep" else 0)
    except asyncio.CancelledError:
        print("cancelled")
        raise
    if len(events) > 1 and any(event.body == b"poison" for event in events):
        raise RuntimeError("not together")
    return [len(events) for _ in events]
"""


LEFT = """
from torch_shim.wire.current_call import seconds_left
def handle_batch(events, context):
    return [str(seconds_left()) for _ in events]
"""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as found:
        yield found


# -- coroutines ---------------------------------------------------------------------------------


def test_coroutine_is_given_lists_too(pool: ThreadPoolExecutor) -> None:
    with served(ASYNC, 3) as running:
        assert [each.body for each in answers(pool, running, "a", "b", "c")] == [b"3"] * 3
        found = answers(pool, running, "a", "poison", "c")
        assert [each.body for each in found] == [b"1"] * 3


def test_coroutine_is_cancelled_when_all_its_clients_have_left(pool: ThreadPoolExecutor) -> None:
    with served(ASYNC, 2) as running:
        first, second = sent_by(running, b"sleep"), sent_by(running, b"sleep")
        running.until_written("list of 2")
        first.close()
        assert running.call("/_/ready", method="GET").status == 200
        assert "cancelled" not in running.written()
        second.close()
        running.until_written("cancelled")
        assert [each.body for each in answers(pool, running, "a", "b")] == [b"2"] * 2


# -- clients that leave, deadlines, bodies ------------------------------------------------------


def test_client_that_leaves_in_mid_batch_costs_the_others_nothing(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with served(HANDLER, 2) as running:
        leaving = sent_by(running, b"gone")
        staying = posted(pool, running, "a", **{"X-Gate": str(gate)})
        running.until_written("list ['a', 'gone']")
        leaving.close()
        running.call("/_/ready", method="GET")
        gate.touch()
        assert json.loads(staying[0].result().body)["count"] == 2
        assert running.written().count("list [") == 1


def test_client_that_leaves_while_it_waits_is_not_in_the_list(pool: ThreadPoolExecutor) -> None:
    with served(HANDLER, 2) as running:
        sent_by(running, b"gone").close()
        running.call("/_/ready", method="GET")
        found = answers(pool, running, "a", "b")
        assert [json.loads(each.body)["count"] for each in found] == [2, 2]
        assert "gone" not in running.written()


def test_call_whose_time_is_up_while_it_waits_is_answered_504(pool: ThreadPoolExecutor) -> None:
    with served(HANDLER, 2, exec_timeout="5s") as running:
        assert running.call(body=b"late").status == 504
        found = answers(pool, running, "a", "b")
        assert [each.status for each in found] == [200, 200]
        assert "late" not in running.written().split("took longer")[1]


def test_deadline_of_one_member_leaves_the_others_their_answers(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with served(HANDLER, 2, exec_timeout="10s") as running:
        early = posted(pool, running, "early")
        time.sleep(5.0)
        late = posted(pool, running, "late", **{"X-Gate": str(gate)})
        assert early[0].result().status == 504
        gate.touch()
        assert late[0].result().status == 200
        assert running.process.poll() is None


def test_shim_learns_how_much_time_a_list_has_left(pool: ThreadPoolExecutor) -> None:
    with served(
        LEFT, 2, GPUFAAS_ENABLED="1", PYTHONPATH=str(ACTIVATE), exec_timeout="30s"
    ) as running:
        found = [json.loads(each.body) for each in answers(pool, running, "a", "b")]
        assert all(20.0 < left_s < 30.0 for left_s in found)
        hurried, patient = (
            posted(pool, running, "a", **{"X-Gpu-Within": seconds})[0] for seconds in ("2", "29")
        )
        found = [json.loads(each.result().body) for each in (hurried, patient)]
    assert all(5.0 < left_s < 29.0 for left_s in found), "as long as one of them is waited for"


def test_batch_that_never_ends_holds_up_the_next_one_only_for_its_time_limit(
    tmp_path: Path,
) -> None:
    with served(HANDLER, 2, "0", exec_timeout="500ms", GPUFAAS_THREADS="2") as running:
        never = {"X-Gate": str(tmp_path / "never")}
        assert running.call(body=b"stuck", headers=never).status == 504
        wait_until(lambda: running.call(body=b"a").status == 200, "the next batch")
        running.call(body=b"stuck", headers=never)
        assert running.process.wait() == 1
        assert "every thread is held" in running.written()


def test_body_that_is_too_large_is_refused_alone(pool: ThreadPoolExecutor) -> None:
    with served(HANDLER, 2, GPUFAAS_MAX_BODY_BYTES="100") as running:
        found = answers(pool, running, "a", "b" * 101, "c")
        assert [each.status for each in found] == [200, 413, 200]
        assert running.written() == "list ['a', 'c']\n"
