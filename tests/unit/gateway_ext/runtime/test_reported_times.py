"""A function's report of its time and its models, and its receiver."""

import http.client
import json

from gateway_ext.tracing.tracer import read_report
from tests.kit.places import ROOT
from tests.kit.processes.runtime_process import Unix, runtime

TRACE = {"traceparent": f"00-{32 * 'a'}-{16 * 'b'}-01"}
HANDLER = """
import asyncio, time
def handle(event, context):
    if event.path == "/stream":
        return slowly()
    if event.path == "/raise":
        time.sleep(0.03)
        raise ValueError("its own mistake")
    time.sleep(0.03)
    return event.headers["traceparent"]
def slowly():
    for number in range(3):
        time.sleep(0.02)
        yield str(number)
"""
MODELS = """
from torch_shim.leases import request_context
def handle(event, context):
    return pieces(event.body.decode().split())
def pieces(names):
    for name in names:
        if name == "-":
            yield name
        else:
            request_context.note_model(name)
"""
LATER = """
import asyncio
async def handle(event, context):
    await asyncio.sleep(0.03)
    if event.path == "/stream":
        return pieces()
    return "done"
async def pieces():
    for number in range(3):
        await asyncio.sleep(0.02)
        yield str(number)
"""


def took_us(header: str) -> int:
    handler = read_report(header.encode()).handler
    assert handler is not None, header
    assert handler.begin_us > 1e15
    return handler.took_us


def streamed(path: str, asked: str = "") -> tuple[str, bytes, dict[str, str]]:
    """The answer's head and body, and what comes behind it, which http.client drops."""
    connection = Unix(path)
    connection.request("POST", "/stream", asked, headers=TRACE)
    assert connection.sock is not None
    content = b""
    while b"\r\n0\r\n" not in content or not content.endswith(b"\r\n\r\n"):
        piece = connection.sock.recv(65536)
        assert piece, content
        content += piece
    connection.close()
    head, _, rest = content.partition(b"\r\n\r\n")
    body, _, end = rest.rpartition(b"\r\n0\r\n")
    lines = [line.partition(b": ") for line in end.split(b"\r\n") if line]
    behind = {name.decode(): value.decode() for name, _, value in lines}
    return head.decode(), body, behind


def test_time_of_the_handler_is_reported_when_the_call_belongs_to_a_trace() -> None:
    with runtime(HANDLER) as running:
        answer = running.call(headers=TRACE)
        assert answer.body == TRACE["traceparent"].encode()
        assert 25_000 < took_us(answer.headers["X-Gpu-Trace"]) < 25_000_000
        failed = running.call("/raise", headers=TRACE)
        assert failed.status == 500
        assert took_us(failed.headers["X-Gpu-Trace"]) > 25_000
    with runtime(LATER) as running:
        assert took_us(running.call(headers=TRACE).headers["X-Gpu-Trace"]) > 25_000


def test_time_of_a_stream_follows_it() -> None:
    for handler, least_us in ((HANDLER, 55_000), (LATER, 85_000)):
        with runtime(handler) as running:
            head, body, behind = streamed(running.path)
            assert "Trailer: X-Gpu-Trace\r\n" in head
            assert body.count(b"\r\n") > 3
            assert took_us(behind["X-Gpu-Trace"]) > least_us
            # A client that does not ask for trailers reads the same stream.
            assert running.call("/stream", headers=TRACE).body == b"012"


def test_models_that_a_stream_uses_after_its_first_piece_follow_it() -> None:
    with runtime(MODELS, GPUFAAS_ENABLED="1", PYTHONPATH=str(ROOT)) as running:
        head, _, behind = streamed(running.path, "- bert resnet -")
        assert "X-Gpu-Models: " not in head
        assert "Trailer: X-Gpu-Trace, X-Gpu-Models, X-Gpu-Local\r\n" in head
        assert behind["X-Gpu-Models"] == "bert,resnet"
        # What is known by the first piece is said at once, and not again.
        head, _, behind = streamed(running.path, "bert - resnet")
        assert "X-Gpu-Models: bert\r\n" in head
        assert "X-Gpu-Models" not in behind


def test_nothing_is_reported_when_the_call_belongs_to_no_trace() -> None:
    with runtime(HANDLER.replace('event.headers["traceparent"]', '"fine"')) as running:
        for path in ("/", "/stream", "/raise"):
            headers = running.call(path).headers
            assert not {"X-Gpu-Trace", "Trailer"} & headers.keys()


def test_lines_of_the_runtime_are_json_when_asked_for() -> None:
    with runtime(HANDLER, GPUFAAS_LOG_FORMAT="json") as running:
        running.call("/raise", headers={**TRACE, "X-Call-Id": "c1"})
        running.until_written("its own mistake")
        (line,) = [line for line in running.written().splitlines() if "its own mistake" in line]
        content = json.loads(line)
    assert (content["call_id"], content["trace_id"]) == ("c1", 32 * "a")
    assert content["message"].startswith("POST /raise raised")


def test_answer_is_whole_when_a_trailer_comes_to_a_client_of_before() -> None:
    with runtime(HANDLER) as running:
        connection: http.client.HTTPConnection = Unix(running.path)
        for _ in range(2):  # the trailer does not disturb the next answer
            connection.request("GET", "/stream", headers=TRACE)
            assert connection.getresponse().read() == b"012"
        connection.close()
