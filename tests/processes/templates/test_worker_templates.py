"""Several workers of one process are forks of one template, which is warmed by the examples."""

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kit.processes.runtime_process import Running, runtime
from tests.kit.waiting import wait_until

_TELLING = """
import os
IMPORTED_BY = os.getpid()
CALLS = []
def handle(event, context):
    if event.path == "/orphan" and not os.fork():
        os.fork() or os._exit(0)
        os._exit(0)
    CALLS.append(event.body.decode())
    return {"imported_by": IMPORTED_BY, "pid": os.getpid(), "parent": os.getppid(), "calls": CALLS}
"""
_THREAD = "from threading import Event, Thread\nThread(target=Event().wait, daemon=True).start()\n"

# A template whose first report is none: brackets without end.
_NO_REPORT = """
import os, socket
if "GPUFAAS_TEMPLATE=" in open("/proc/self/environ").read():
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            line = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        if line.type == socket.SOCK_SEQPACKET:
            line.send(b"[" * 5000)
        line.close()
"""


def told(running: Running) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(running.call().body)
    return found


def until_told(running: Running, enough: Callable[[dict[int, dict[str, Any]]], bool]) -> list[Any]:
    """What the workers say, once enough of them have said it."""
    found: dict[int, dict[str, Any]] = {}

    def has_enough() -> bool:
        one = told(running)
        found[one["pid"]] = one
        return enough(found)

    wait_until(has_enough, "enough workers", instead=running.written)
    return list(found.values())


def test_workers_are_forks_of_one_template_and_children_of_the_process() -> None:
    with runtime(_TELLING, workers=3) as running:
        workers = until_told(running, lambda found: len(found) == 3)
        assert len({one["imported_by"] for one in workers}) == 1
        assert all(one["imported_by"] != one["pid"] for one in workers)
        assert {one["parent"] for one in workers} == {running.process.pid}
        assert running.stop() == 0


def test_worker_that_died_is_replaced_by_a_fork_and_its_end_is_told() -> None:
    with runtime(_TELLING, workers=1 + 1) as running:
        first = until_told(running, lambda found: len(found) == 2)
        os.kill(first[0]["pid"], signal.SIGKILL)
        running.until_written("was ended by SIGKILL")
        workers = until_told(running, lambda found: len(set(found) - {first[0]["pid"]}) == 2)
        assert {one["imported_by"] for one in workers} == {first[0]["imported_by"]}


def test_workers_begin_warm_when_there_are_examples() -> None:
    with runtime(_TELLING, workers=2, example='[{"body": "example"}]') as running:
        workers = until_told(running, lambda found: len(found) == 2)
        assert all(one["calls"][0] == "example" for one in workers)


def test_workers_are_served_when_the_examples_fail() -> None:
    with runtime(_TELLING, workers=2, example='[{"unknown": 1}]') as running:
        workers = until_told(running, lambda found: len(found) == 2)
        assert all(one["calls"][0] == "" for one in workers)
        assert "unknown: unknown" in running.written()


def test_workers_are_started_anew_when_the_handler_cannot_be_forked() -> None:
    with runtime(_THREAD + _TELLING, workers=2) as running:
        workers = until_told(running, lambda found: len(found) == 2)
        assert all(one["imported_by"] == one["pid"] for one in workers)
        assert running.stop() == 0


def test_workers_are_started_anew_when_the_template_sends_what_is_no_report() -> None:
    with runtime(_NO_REPORT + _TELLING, workers=2) as running:
        workers = until_told(running, lambda found: len(found) == 2)
        assert all(one["imported_by"] == one["pid"] for one in workers)
        assert "workers are started without a template: sent what is no report" in running.written()
        assert running.stop() == 0


def test_workers_go_on_when_their_template_dies() -> None:
    with runtime(_TELLING, workers=2) as running:
        first = until_told(running, lambda found: len(found) == 2)
        os.kill(first[0]["imported_by"], signal.SIGKILL)
        assert told(running)["pid"] in {one["pid"] for one in first}
        os.kill(first[0]["pid"], signal.SIGKILL)
        workers = until_told(running, lambda found: len(set(found) - {first[0]["pid"]}) == 2)
        assert first[0]["imported_by"] not in {
            one["imported_by"] for one in workers if one["pid"] != first[1]["pid"]
        }


def test_no_zombie_is_left_of_what_workers_leave() -> None:
    with runtime(_TELLING, workers=2) as running:
        until_told(running, lambda found: len(found) == 2)
        assert running.call("/orphan").status == 200
        wait_until(lambda: not _zombies_of(running.process.pid), "no zombie")


def _zombies_of(parent: int) -> list[str]:
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                found.append(pid)
    return found
