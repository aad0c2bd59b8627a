"""How much time a call has left, as the shim in its function is told."""

import json
import time
from contextlib import AbstractContextManager
from pathlib import Path

from tests.kit.places import ACTIVATE
from tests.kit.processes.runtime_process import Running, runtime
from tests.kit.waiting import wait_until

HANDLER = """
import time
from pathlib import Path
from torch_shim.wire.current_call import seconds_left
def handle(event, context):
    if event.path == "/left":
        while seconds_left():
            time.sleep(0.01)
        Path(event.query["file"]).write_text("nobody waits")
    return [seconds_left()]
async def later(event, context):
    return [seconds_left()]
"""
STREAM = """
from torch_shim.wire.current_call import seconds_left
def handle(event, context):
    for _ in range(2):
        yield f"{seconds_left()} "
async def later(event, context):
    for _ in range(2):
        yield f"{seconds_left()} "
"""
IN_LOOP = "handle = later\n"


def served(handler: str, exec_timeout: str = "0") -> AbstractContextManager[Running]:
    shim = str(ACTIVATE)
    return runtime(handler, GPUFAAS_ENABLED="1", PYTHONPATH=shim, exec_timeout=exec_timeout)


def left_s(running: Running, **headers: str) -> float | None:
    (found,) = json.loads(running.call(headers=headers).body)
    assert found is None or isinstance(found, float)
    return found


def test_time_that_a_call_has_left_reaches_the_shim() -> None:
    for text in (HANDLER, HANDLER + IN_LOOP):
        with served(text, "30s") as running:
            assert 20.0 < (left_s(running) or 0.0) < 30.0
    with served(HANDLER) as running:
        assert left_s(running) is None
        assert 0.0 <= (left_s(running, **{"X-Gpu-Within": "2.5"}) or 0.0) <= 2.5
        for no_time in ("soon", "nan", "-1", "inf", ""):
            assert left_s(running, **{"X-Gpu-Within": no_time}) is None


def test_rest_of_a_stream_is_waited_for_no_longer_than_its_beginning() -> None:
    for text in (STREAM, STREAM + IN_LOOP):
        with served(text, "30s") as running:
            body = running.call(headers={"X-Gpu-Within": "2.5"}).body
            first_s, second_s = map(float, body.split())
            assert 2.5 >= first_s >= second_s


def test_time_runs_from_the_head_of_the_request_on() -> None:
    """A body that comes slowly gets no time beyond that in which the gateway answers 504."""
    with served(HANDLER) as running, running.socket() as sock:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nx-gpu-within: 0.2\r\n\r\n"
        sock.sendall(head + b"a")
        assert left_s(running, **{"X-Gpu-Within": "900"})  # it has read the head by then
        time.sleep(0.3)
        sock.sendall(b"b")
        assert sock.recv(65536).endswith(b"\r\n\r\n[0.0]")


def test_call_whose_client_has_left_waits_for_nothing_more(tmp_path: Path) -> None:
    file = tmp_path / "seen"
    with served(HANDLER, "300s") as running:
        with running.socket() as sock:
            sock.sendall(f"GET /left?file={file} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert left_s(running)  # it has read the head by then
            assert not file.exists()
        wait_until(file.exists, "the call knows that nobody waits")
