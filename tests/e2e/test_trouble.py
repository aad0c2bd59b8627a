"""Functions that misbehave, callers that leave, and what the others notice of it: nothing."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.stacks.handlers import GREETING, ON_GPU, PLAIN, TROUBLE, write
from tests.kit.stacks.load import Asked, counted, load, warm
from tests.kit.stacks.stack import PATIENCE_S, Rest, Stack, leases
from tests.kit.waiting import wait_until

CALL = "the-one-who-leaves"
IN_FLIGHT = "gpufaas_gateway_calls_in_flight"


@pytest.fixture(scope="module")
def trouble(up: Stack) -> Iterator[str]:
    """The function that does on request what none should do."""
    rest = Rest(up)
    annotations = {**write(up.work, "trouble", TROUBLE), **PLAIN}
    # As long as a machine that does much else may let a process wait that would answer at once.
    rest.deploy("trouble", annotations=annotations, envVars={"exec_timeout": "10s"})
    yield "trouble"
    rest.remove("trouble")


@pytest.fixture(scope="module")
def patient(up: Stack) -> Iterator[str]:
    """The same with all the time that it wants."""
    rest = Rest(up)
    annotations = {**write(up.work, "patient", TROUBLE), **PLAIN}
    rest.deploy("patient", annotations=annotations)
    yield "patient"
    rest.remove("patient")


@pytest.fixture(scope="module")
def on_gpu(up: Stack) -> Iterator[str]:
    """A function with a model."""
    rest = Rest(up)
    gpu = {"com.gpufaas.enabled": "true"}
    rest.deploy("on-gpu", annotations={**write(up.work, "on-gpu", ON_GPU), **gpu})
    warm(up, rest, Asked("on-gpu"))
    yield "on-gpu"
    rest.remove("on-gpu")


def test_caller_is_told_when_the_handler_raises(trouble: str, rest: Rest) -> None:
    answer = rest.call(f"{trouble}/raise")
    assert answer.status_code == 500
    assert "Traceback" not in answer.text
    wait_until(
        lambda: "the handler's own mistake" in rest.ask("GET", "/system/logs?name=trouble").text,
        "the log has the traceback",
    )
    assert rest.call(f"{trouble}/fine").status_code == 200


def test_caller_is_answered_504_when_the_handler_never_answers(trouble: str, rest: Rest) -> None:
    assert rest.call(f"{trouble}/hang").status_code == 504
    assert rest.call(f"{trouble}/fine").status_code == 200


def test_function_is_back_when_its_process_died(trouble: str, rest: Rest) -> None:
    before = rest.call(f"{trouble}/fine").text
    assert rest.call(f"{trouble}/die").status_code == 502
    answer = rest.call(f"{trouble}/fine")  # it waits for the process that follows
    assert (answer.status_code, answer.text != before) == (200, True)


def test_large_answer_arrives_whole(patient: str, up: Stack, rest: Rest) -> None:
    size = 100_000_000
    before = _resident_bytes(up)
    answer = rest.call(f"{patient}/large?bytes={size}")
    assert answer.status_code == 200
    assert len(answer.content) == size
    assert answer.content.count(b"x") == size
    # Neither copies of it nor the whole of it stay in the gateway.
    assert _resident_bytes(up) - before < size


def test_stream_arrives_piece_by_piece(patient: str, rest: Rest) -> None:
    count, every_s = 100, 0.1
    url = f"/function/{patient}/stream?count={count}&every_s={every_s}"
    heard: list[str] = []
    with rest.stream("GET", url) as answer:
        for line in answer.iter_lines():
            if not heard:
                # The first piece is here long before the last is made.
                assert rest.metric(IN_FLIGHT, function_name=f"{patient}.openfaas-fn") == 1
            heard += [line] if line else []
    assert heard == [f"data: {number}" for number in range(count)]


def test_instance_is_free_when_its_caller_left_a_stream(
    patient: str, up: Stack, rest: Rest
) -> None:
    with _left_after_first_piece(up, f"/function/{patient}/stream?count=10000&every_s=0.05"):
        pass
    wait_until(
        lambda: rest.metric(IN_FLIGHT, function_name=f"{patient}.openfaas-fn") == 0,
        "no call in flight",
    )
    wait_until(
        lambda: "the stream has ended" in rest.ask("GET", f"/system/logs?name={patient}").text,
        "the handler's generator is closed",
    )


def test_no_call_fails_when_the_function_is_updated_under_load(up: Stack, rest: Rest) -> None:
    annotations = {**write(up.work, "renewed", GREETING), **PLAIN}
    rest.deploy("renewed", annotations=annotations, envVars={"GREETING": "old"})
    with load(up.url, [Asked("renewed", b"x"), Asked("renewed/slow?s=0.2", b"x")], each=3) as found:
        found.some_more()
        for number in range(3):
            changed = {"GREETING": f"new{number}"}
            rest.deploy("renewed", method="PUT", annotations=annotations, envVars=changed)
            wait_until(
                lambda greeting=f"new{number}": rest.call("renewed").text.startswith(greeting),  # type: ignore[misc]  # mypy infers no lambda with a default
                "the new one answers",
            )
            found.some_more(5)
    assert not found.failures, counted(found.failures)
    rest.remove("renewed")


def test_function_hears_of_too_little_gpu_memory_as_torch_says_it(
    on_gpu: str, up: Stack, rest: Rest
) -> None:
    assert rest.call(on_gpu).json()["device"].startswith("cuda")
    answer = rest.call(f"{on_gpu}/much")
    assert answer.status_code == 507, answer.text
    assert "memory" in answer.json()["error"]
    assert rest.call(on_gpu).status_code == 200
    wait_until(lambda: not leases(up), "no lease", instead=lambda: str(leases(up)))


def test_gpu_is_free_when_the_caller_left_its_answer(on_gpu: str, up: Stack, rest: Rest) -> None:
    def held() -> bool:
        return any(CALL in request for lease in leases(up) for request in lease["requests"])

    with _left_after_first_piece(up, f"/function/{on_gpu}/held"):
        wait_until(held, "it holds a GPU while it answers")
    wait_until(lambda: not held(), "it holds none", instead=lambda: str(leases(up)))
    name = f"{on_gpu}.openfaas-fn"
    wait_until(lambda: rest.metric(IN_FLIGHT, function_name=name) == 0, "no call in flight")
    assert rest.call(on_gpu).status_code == 200


def test_policy_changes_under_load_and_no_call_is_lost(on_gpu: str, up: Stack) -> None:
    running = up.run("policy", "get", "--json", *_scheduler(up))
    before = json.loads(running.stdout)["policy"]
    with load(up.url, [Asked(on_gpu)], each=4) as found:
        for policy in ("lb", "lalb", "rr", before):
            found.some_more(10)
            done = up.run("policy", "set", policy, *_scheduler(up))
            assert done.returncode == 0, done.stderr
            assert up.scheduler.get("/policy")["policy"] == policy
        found.some_more(10)
    assert not found.failures, counted(found.failures)


def _scheduler(up: Stack) -> tuple[str, ...]:
    return ("--scheduler", up.scheduler_url, "--secret-file", str(up.state / "secret"))


@contextmanager
def _left_after_first_piece(up: Stack, path: str) -> Iterator[None]:
    """A caller who has read the first piece of an answer, and hangs up at the end."""
    with socket.create_connection(("127.0.0.1", up.port), timeout=PATIENCE_S) as caller:
        caller.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-Call-Id: {CALL}\r\n\r\n".encode()
        )
        received = b""
        while b"\r\n\r\n" not in received or received.endswith(b"\r\n\r\n"):
            received += caller.recv(1000)
        assert received.startswith(b"HTTP/1.1 200"), received
        yield


def _resident_bytes(up: Stack) -> int:
    """Of the gateway's process."""
    pages = int(Path(f"/proc/{up.part('-m gpufaas gateway')}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
