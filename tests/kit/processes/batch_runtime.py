"""A runtime whose handler takes lists, and calls of it that are made at once."""

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from http.client import HTTPResponse

from tests.kit.processes.runtime_process import Answered, Running, runtime

TRACE = {"traceparent": f"00-{32 * 'a'}-{16 * 'b'}-01"}
# Answers what each body says; the list's size is in each answer.
HANDLER = """
import os, time
from pathlib import Path
def handle_batch(events, context):
    print("list", sorted(event.body.decode() for event in events))
    for event in events:
        gate = event.headers.get("x-gate")
        while gate and not Path(gate).exists():
            time.sleep(0.01)
        if event.body == b"poison":
            raise ValueError("a poisoned call")
    return [answer(event, len(events)) for event in events]
def answer(event, count):
    kind = event.body.decode()
    if kind == "error":
        return KeyError("only mine")
    if kind == "status":
        return {"statusCode": 418, "body": "teapot", "headers": {"X-Mine": "yes"}}
    if kind == "stream":
        return (piece for piece in "abc")
    if kind == "unsendable":
        return object()
    return {"body": kind, "count": count, "pid": os.getpid()}
"""


def posted(
    pool: ThreadPoolExecutor, running: Running, *bodies: str, **headers: str
) -> list[Future[Answered]]:
    return [
        pool.submit(running.call, "/", body.encode(), headers={**TRACE, **headers})
        for body in bodies
    ]


def answers(
    pool: ThreadPoolExecutor, running: Running, *bodies: str, **headers: str
) -> list[Answered]:
    """The answers to calls that are all sent at once."""
    return [each.result() for each in posted(pool, running, *bodies, **headers)]


def served(
    handler: str,
    most: int,
    wait: str = "60s",
    *,
    ready: bool = True,
    workers: int = 1,
    example: str = "",
    **more: str,
) -> AbstractContextManager[Running]:
    """Lists of exactly so many, unless told otherwise: the first call waits for the last one."""
    return runtime(
        handler,
        ready=ready,
        workers=workers,
        example=example,
        GPUFAAS_BATCH_HANDLER=str(most),
        GPUFAAS_BATCH_WAIT=wait,
        **more,
    )


def sent_by(running: Running, body: bytes, **headers: str) -> socket.socket:
    """A connection on which a call was sent; what is sent on another one later is read later."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    sock = running.socket()
    sock.sendall(head.encode() + body)
    return sock


def answered_on(sock: socket.socket) -> Answered:
    """The answer to the call on this connection, which is closed."""
    with sock, HTTPResponse(sock) as response:
        response.begin()
        return Answered(response.status, dict(response.headers), response.read())
