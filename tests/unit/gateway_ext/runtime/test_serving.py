"""The runtime as a process: calls, streams, failures, times, and its end."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gateway_ext.calls.learned import thread_wait
from tests.kit.places import ACTIVATE
from tests.kit.processes.runtime_process import RUNTIME, Running, runtime
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.group("serving", seconds=40)

ECHO = """
import os, threading
IN = threading.current_thread() is threading.main_thread()
def handle(event, context):
    return {"statusCode": 201, "headers": {"X-Kept": event.headers.get("x-a", "")}, "body": {
        "body": event.body.decode(), "path": event.path, "query": event.query.to_dict(),
        "method": event.method, "host": context.hostname, "main": IN, "pid": os.getpid()}}
"""
STREAM = """
import time
from pathlib import Path
def handle(event, context):
    def pieces():
        try:
            for number in range(int(event.query["n"])):
                yield f"data: {number}\\n\\n"
                time.sleep(float(event.query.get("s", 0)))
        finally:
            print("closed")
    return {"statusCode": 200, "headers": {"Content-Type": "text/event-stream"}, "body": pieces()}
"""
ASYNC = """
import asyncio
async def handle(event, context):
    if event.path == "/stream":
        return pieces()
    if event.query:
        print("begins")
    try:
        await asyncio.sleep(float(event.query.get("s", 0)))
    except asyncio.CancelledError:
        print("cancelled")
        raise
    return "slept"
async def pieces():
    for number in range(3):
        yield str(number)
        await asyncio.sleep(0)
"""
SLEEP = """
import time
def handle(event, context):
    if event.query:
        print("begins")
    time.sleep(float(event.query.get("s", 0)))
    return "slept"
"""


def read_until(sock: socket.socket, text: bytes) -> bytes:
    got = b""
    while text not in got:
        part = sock.recv(65536)
        assert part, got
        got += part
    return got


def test_call_reaches_the_handler_and_its_answer_the_caller() -> None:
    with runtime(ECHO, HOSTNAME="me") as running:
        answer = running.call("/p%20q?x=1", b"hi", headers={"X-A": "kept"})
        assert answer.status == 201
        assert answer.headers["X-Kept"] == "kept"
        for part in (b'"hi"', b'"/p q"', b'{"x": "1"}', b'"POST"', b'"me"', b'"main": true'):
            assert part in answer.body
        head = running.call(method="HEAD")
        assert (head.status, head.body) == (201, b"")
        assert int(head.headers["Content-Length"]) > 0


def test_requests_are_answered_in_order_when_pipelined() -> None:
    one = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nb"
    last = b"GET /_/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with runtime(ECHO) as running:
        answers = running.raw(b"".join(one % number for number in range(50)) + last)
    places = [answers.index(b'"/%d"' % number) for number in range(50)]
    assert places == sorted(places)
    assert answers.endswith(b"\r\n\r\nOK\n")


def test_body_is_taken_when_chunked_and_continued() -> None:
    with runtime(ECHO) as running, running.socket() as sock:
        sock.sendall(
            b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        )
        assert read_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"2\r\nhi\r\n0\r\n\r\n")
        assert b'"hi"' in b"".join(iter(lambda: sock.recv(65536), b""))


def test_request_is_refused_when_malformed_or_too_large() -> None:
    with runtime(ECHO, GPUFAAS_MAX_BODY_BYTES="10") as running:
        assert running.raw(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        # One piece: a refused body is not read, so that a second one would find the socket closed.
        too_large = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n" + b"x" * 11
        assert running.raw(too_large).startswith(b"HTTP/1.1 413 ")
        assert running.call(body=b"x" * 10).status == 201


def test_pieces_come_as_they_are_made(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gated = f"""
import time
from pathlib import Path
def handle(event, context):
    def pieces():
        yield "data: 0\\n\\n"
        while not Path({str(gate)!r}).exists():
            time.sleep(0.01)
        yield "data: 1\\n\\n"
    headers = {{"Content-Type": "text/event-stream"}}
    return {{"statusCode": 200, "headers": headers, "body": pieces()}}
"""
    with runtime(gated) as running, running.socket() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = read_until(sock, b"data: 0")
        assert b"data: 1" not in head
        gate.touch()
        assert b"Transfer-Encoding: chunked" in head
        assert b"text/event-stream" in head
        assert read_until(sock, b"0\r\n\r\n").count(b"data: 1") == 1


def test_generator_is_closed_when_the_client_leaves() -> None:
    with runtime(STREAM) as running:
        with running.socket() as sock:
            sock.sendall(b"GET /?n=100000&s=0.01 HTTP/1.1\r\nHost: x\r\n\r\n")
            read_until(sock, b"data: 3")
        running.until_written("closed")
        assert running.call("/?n=1", method="GET").body == b"data: 0\n\n"


def test_generator_waits_when_the_client_reads_slowly() -> None:
    many = """
made = 0
def handle(event, context):
    global made
    if event.path == "/made":
        return made
    def pieces():
        global made
        for made in range(100000):
            yield b"x" * 10000
    return pieces()
"""
    with runtime(many) as running, running.socket() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        read_until(sock, b"xxx")
        time.sleep(0.5)
        assert int(running.call("/made").body) < 2000


def test_asynchronous_handler_answers_streams_and_is_cancelled() -> None:
    with runtime(ASYNC) as running:
        assert running.call().body == b"slept"
        assert running.call("/stream").body == b"012"
        with running.socket() as sock:
            sock.sendall(b"GET /?s=60 HTTP/1.1\r\nHost: x\r\n\r\n")
            running.until_written("begins")
        running.until_written("cancelled")


def test_every_call_is_answered_when_a_plain_handler_returns_something_asynchronous() -> None:
    handler = """
import asyncio
async def slept():
    await asyncio.sleep(0)
    return "slept"
async def pieces():
    yield "0"
    yield "1"
def handle(event, context):
    return pieces() if event.path == "/stream" else slept()
"""
    with runtime(handler) as running:
        for _ in range(150):
            assert running.call().body == b"slept"
            assert running.call("/stream").body == b"01"


def test_failure_is_500_and_in_the_log_with_its_call_id() -> None:
    with runtime("def handle(event, context):\n    raise KeyError('secret')\n") as running:
        answer = running.call(headers={"X-Call-Id": "call-7"})
        assert (answer.status, answer.body) == (500, b"the function raised KeyError\n")
        running.until_written("KeyError: 'secret'")
        assert "[call-7] POST / raised" in running.written()


def test_call_is_answered_when_the_text_of_an_error_is_no_text() -> None:
    """As half of a letter in a caller's JSON."""
    broken = (
        "import json\ndef handle(event, context):\n    raise ValueError(json.loads(event.body))\n"
    )
    with runtime(broken, GPUFAAS_SHOW_ERRORS="1") as running:
        answer = running.call(body=b'"no \\ud83d"')
        assert answer.status == 500
        assert answer.body.startswith(b"the function raised ValueError: no \\ud83d")


def test_stream_is_broken_off_when_it_fails_after_its_first_piece() -> None:
    broken = "def handle(event, context):\n    yield 'first'\n    raise ValueError('later')\n"
    with runtime(broken) as running:
        got = running.raw(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert got.endswith(b"5\r\nfirst\r\n")
        running.until_written("ValueError: later")


def test_call_is_answered_504_when_it_takes_too_long() -> None:
    with runtime(SLEEP, exec_timeout="500ms") as running:
        assert running.call("/?s=60").status == 504  # within a client's patience of 20 s
        wait_until(lambda: running.call().body == b"slept", "a call that ends in time")


def test_no_line_is_logged_for_a_call_that_ended_after_its_client_had_left() -> None:
    with runtime(SLEEP, exec_timeout="4s", GPUFAAS_THREADS="1") as running:
        with running.socket() as sock:
            sock.sendall(b"GET /?s=0.3 HTTP/1.1\r\nHost: x\r\n\r\n")
            running.until_written("begins")
        time.sleep(4.2)
        assert running.call().body == b"slept"
        assert "took longer" not in running.written()


def test_process_gives_way_when_every_thread_is_held() -> None:
    with runtime(SLEEP, exec_timeout="200ms", GPUFAAS_THREADS="1") as running:
        with running.socket() as sock:
            sock.sendall(b"GET /?s=60 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert running.process.wait() == 1
        assert "every thread is held" in running.written()


def test_calls_beyond_max_inflight_are_asked_to_retry() -> None:
    with runtime(SLEEP, max_inflight="1") as running, running.socket() as sock:
        sock.sendall(b"GET /?s=60 HTTP/1.1\r\nHost: x\r\n\r\n")
        running.until_written("begins")
        answer = running.call()
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert running.call("/_/ready", method="GET").status == 200


def test_reports_say_how_many_calls_are_served_at_a_time() -> None:
    trace = {"traceparent": f"00-{32 * '1'}-{16 * '2'}-01"}
    with runtime(SLEEP, GPUFAAS_THREADS="3") as running:
        report = running.call(headers=trace).headers["X-Gpu-Trace"]
        waited = thread_wait(report.encode())
        assert waited is not None
        assert waited.at_a_time == 3
        assert waited.waited_s < 60.0
    with runtime(ASYNC) as running:
        report = running.call(headers=trace).headers["X-Gpu-Trace"]
        assert (thread_wait(report.encode()), report[:4]) == (None, "1 h;")


def test_health_is_answered_before_the_handler_is_there(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = f"""
import time
from pathlib import Path
while not Path({str(gate)!r}).exists():
    time.sleep(0.01)
def handle(event, context):
    return "ok"
"""
    with runtime(slow, ready=False) as running:
        wait_until(running.accepts, "socket")
        assert running.call("/_/health", method="GET").status == 200
        assert running.call("/_/ready", method="GET").status == 503
        assert running.call().status == 503
        gate.touch()
        wait_until(lambda: running.call("/_/ready", method="GET").status == 200, "readiness")
        assert running.call().body == b"ok"


@pytest.mark.parametrize("workers", [1, 2])
def test_process_ends_with_1_when_the_handler_cannot_be_imported(workers: int) -> None:
    missing = "import nothing_of_that_name\n"
    with runtime(missing, ready=False, workers=workers) as running:
        assert running.process.wait() == 1
        assert "ModuleNotFoundError" in running.written().splitlines()[-1]


def test_process_finishes_calls_and_ends_with_0_when_it_is_asked_to_stop() -> None:
    with runtime(SLEEP) as running:
        with running.socket() as sock:
            sock.sendall(b"GET /?s=1 HTTP/1.1\r\nHost: x\r\n\r\n")
            running.until_written("begins")
            running.process.send_signal(signal.SIGTERM)
            assert b"slept" in read_until(sock, b"slept")
        assert running.process.wait() == 0
        assert not os.path.exists(running.path)  # noqa: PTH110 - a plain string


def test_what_the_handler_has_registered_runs_when_the_process_stops() -> None:
    handler = """
import atexit
atexit.register(print, "the handler's own end")
def handle(event, context):
    return "done"
"""
    with runtime(handler) as running:
        assert running.call().status == 200
        assert running.stop() == 0
        assert running.written() == "the handler's own end\n"


def test_client_that_has_just_connected_is_refused_not_reset_when_the_process_stops() -> None:
    patient = "import sys\nsys.modules['gateway_ext.runtime.connection']._FIRST_REQUEST_S = 60.0\n"
    with runtime(patient + ECHO) as running, running.socket() as sock:
        running.call()  # the loop has accepted the connection made before
        running.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not _accepts(running), "end of accepting")
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert running.process.wait() == 0


def test_every_call_is_served_from_the_first_readiness_on_when_there_are_workers() -> None:
    for _ in range(3):
        with runtime(ECHO, workers=2) as running:
            assert {running.call().status for _ in range(50)} == {201}


def test_process_stops_at_once_when_a_worker_still_imports_its_handler() -> None:
    slow = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    with runtime(slow, ready=False, workers=2) as running:
        running.until_written("importing")
        began_s = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - began_s < 30  # the import takes 60


def test_workers_serve_and_are_replaced_when_they_die() -> None:
    with runtime(ECHO, workers=2) as running:
        seen: set[bytes] = set()
        wait_until(lambda: len(_pids(running, seen)) == 2, "second worker")
        first = int(min(seen))
        assert first != running.process.pid
        os.kill(first, signal.SIGKILL)
        running.until_written("another one follows")
        seen.clear()
        wait_until(lambda: len(_pids(running, seen) - {b"%d" % first}) == 2, "new worker")
        assert running.stop() == 0


def test_workers_die_when_their_parent_is_killed() -> None:
    with runtime(ECHO, workers=2) as running:
        worker = int(min(_pids(running, set())))
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not os.path.exists(f"/proc/{worker}"), "end of the worker")  # noqa: PTH110


def test_modules_of_the_function_are_found_and_none_of_ours() -> None:
    handler = """
import importlib.util, sys
from . import handler as again
def handle(event, context):
    return {"same": again is sys.modules[__name__], "name": __name__,
            "ours": [n for n in ("answer", "service", "gateway_ext.model") if _is(n)]}
def _is(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
"""
    with runtime(handler) as running:
        answer = running.call().body
    assert answer == b'{"same": true, "name": "function.handler", "ours": []}'


def test_lease_of_the_headers_reaches_the_shim_for_the_time_of_the_call() -> None:
    handler = """
from torch_shim.leases import request_context as placement
def seen():
    found = placement.current()
    return [found.token] if found else None
def handle(event, context):
    if event.path == "/stream":
        return (f"{one}" for one in [seen()])
    return [seen()]
async def later(event, context):
    return [seen()]
"""
    lease = {"X-Gpu-Address": "unix:/a, tcp:b:1", "X-Gpu-Lease": "t.o"}
    reported = b'[["t.o"]]'
    with runtime(handler, GPUFAAS_ENABLED="1", PYTHONPATH=str(ACTIVATE)) as running:
        assert running.call(headers=lease).body == reported
        assert running.call().body == b"[null]"
        assert running.call("/stream", headers=lease).body == reported[1:-1].replace(b'"', b"'")
    with runtime(
        handler + "handle = later\n", GPUFAAS_ENABLED="1", PYTHONPATH=str(ACTIVATE)
    ) as running:
        assert running.call(headers=lease).body == reported
        assert running.call().body == b"[null]"


def _accepts(running: Running) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(running.path) == 0


def _pids(running: Running, seen: set[bytes]) -> set[bytes]:
    answer = running.call()
    assert answer.status == 201, answer
    seen.add(answer.body.rsplit(b": ", 1)[1].rstrip(b"}"))
    return seen


HANDLE = "def handle(event, context): return"


@pytest.mark.parametrize(
    ("handler", "example", "code", "told"),
    [
        (f"{HANDLE} event.body", '{"body": "x"}', 0, ""),
        (f"{HANDLE} event.body", "", 0, "an empty call is made"),
        (f"{HANDLE} 1 / 0", "{}", 1, "line 1, in handle"),
        (HANDLE + " {'statusCode': 400}", "{}", 1, "answered 400"),
        (f"{HANDLE} object", "{}", 1, "call 1 of example.json: the function returned what cannot"),
        (
            f"{HANDLE} event.body",
            '{"body": "x",}',
            1,
            "example.json: line 1, column 14: Expecting property name enclosed in double quotes",
        ),
        ("import nix", "{}", 1, "its handler cannot be imported: ModuleNotFoundError"),
    ],
)
def test_example_calls_are_made_once_when_asked_for(
    tmp_path: Path, handler: str, example: str, code: int, told: str
) -> None:
    (tmp_path / "handler.py").write_text(handler)
    if example:
        (tmp_path / "example.json").write_text(example)
    done = subprocess.run(
        [sys.executable, str(RUNTIME), "--examples"],
        env={"GPUFAAS_HANDLER": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, told in done.stderr) == (code, True), done.stderr
    assert str(tmp_path) not in done.stderr
    assert not any(name in done.stderr for name in ("gateway_ext", "BadExample", "json/decoder"))
