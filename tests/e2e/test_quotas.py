"""Quotas through a whole stack: who floods is refused by name, and others' calls succeed."""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.kit.stacks.drivers import RestDriver, Wanted
from tests.kit.stacks.handlers import write
from tests.kit.stacks.listening import listening
from tests.kit.stacks.stack import Rest, Stack
from tests.kit.waiting import wait_until

# It holds its GPU until the gate is there: between two GPU calls no lease is given back.
GATED = """
import time
from pathlib import Path
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4).eval().cuda()
def handle(event, context):
    answer()
    while event.query.get("gate") and not Path(event.query["gate"]).exists():
        time.sleep(0.01)
    return f"done {answer()}"
def answer():
    with torch.no_grad():
        return tuple(model(torch.ones(1, 8, device="cuda")).shape)
"""
STREAM = """
import time
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4).eval().cuda()
def handle(event, context):
    return {"statusCode": 200, "body": tokens(int(event.query["count"]))}
def tokens(count):
    for number in range(count):
        time.sleep(0.05)
        with torch.no_grad():
            model(torch.ones(1, 8, device="cuda")).cpu()
        yield f"{number}\\n"
"""
GPU = {"com.gpufaas.enabled": "true", "com.gpufaas.max-wait": "0"}
CALLS = 6
OTHERS = "others"


@pytest.fixture
def namespace(rest: Rest) -> Iterator[str]:
    """A second tenant."""
    assert rest.ask("POST", "/system/namespace/", {"name": OTHERS}).status_code == 201
    yield OTHERS
    rest.ask("DELETE", f"/system/namespace/{OTHERS}", {"name": OTHERS})


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(CALLS) as found:
        yield found


def owner(up: Stack, name: str) -> Any:
    return up.scheduler.get(f"/quotas/{name}")


def learn(rest: Rest, name: str) -> None:
    """Call until the gateway knows the function's models, and asks for leases itself."""

    def is_leased() -> bool:
        before = rest.metric("gpufaas_gateway_lease_seconds_count", result="hit")
        assert rest.call(name).status_code == 200
        return rest.metric("gpufaas_gateway_lease_seconds_count", result="hit") > before

    wait_until(is_leased, "the gateway has a lease for the call")


def quota(up: Stack, *words: str) -> str:
    """What `gpufaas quota` prints."""
    done = up.run(
        "quota", *words, "--scheduler", up.scheduler_url, "--secret-file", str(up.state / "secret")
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ended(calls: Sequence[Future[httpx.Response]]) -> list[httpx.Response]:
    return [call.result() for call in calls if call.done()]


def test_calls_over_quota_get_429_that_names_it_while_others_succeed(
    driver: RestDriver,
    up: Stack,
    rest: Rest,
    namespace: str,
    pool: ThreadPoolExecutor,
) -> None:
    quotas = {"com.gpufaas.leases": "1", "com.gpufaas.waiting": "1"}
    written = write(up.work, "gated", GATED)
    driver.deploy(Wanted("flooding", "e2e/flooding:1", {**written, **GPU, **quotas}))
    driver.deploy(Wanted("calm", "e2e/calm:1", {**written, **GPU}, namespace=namespace))
    rest.ready("flooding")
    learn(rest, "flooding")
    terms = owner(up, "openfaas-fn/flooding")
    assert (terms["set_by"], terms["terms"]["leases"], terms["terms"]["waiting"]) == (
        "function", 1, 1,
    )  # fmt: skip
    gate = up.work / "gate"  # functions run as another user
    path = f"flooding?gate={gate}"
    calls = [pool.submit(rest.call, path) for _ in range(CALLS)]
    wait_until(lambda: len(ended(calls)) == CALLS - 2, "all others are refused", instead=up.said)
    for refused in ended(calls):
        assert refused.status_code == 429, refused.text
        assert "quota waiting of openfaas-fn/flooding" in refused.text
        assert int(refused.headers["Retry-After"]) >= 1
    assert "done" in driver.invoke("calm", "", namespace)
    with listening() as callback:
        before = put_off(rest)
        driver.invoke_later("flooding", "", callback.url)
        wait_until(lambda: put_off(rest) > before, "the async call is put off")
        gate.touch()
        posted = callback.next()
    assert (posted.headers["X-Function-Status"], posted.body[:4]) == ("200", b"done")
    assert sorted(call.result().status_code for call in calls) == [200, 200, 429, 429, 429, 429]
    shown = owner(up, "openfaas-fn/flooding")["use"]
    assert shown["refused"]["waiting"] >= CALLS - 2
    driver.remove("flooding")
    driver.remove("calm", namespace)
    wait_until(lambda: not owner(up, "openfaas-fn/flooding")["set_by"], "its terms have gone")


def put_off(rest: Rest) -> float:
    """Attempts of async calls that are followed by others."""
    return rest.metric("gpufaas_gateway_job_attempts_total", outcome="again")


def test_function_that_asks_by_itself_is_put_off_too(up: Stack, rest: Rest) -> None:
    """Its models are not known before its first call, so its own process asks for the lease."""
    wanted = {**write(up.work, "gated", GATED), **GPU, "com.gpufaas.memory-quota": "1"}
    rest.deploy("tiny", annotations=wanted)
    answers: list[httpx.Response] = []

    def is_refused() -> bool:
        answers.append(rest.call("tiny"))
        return answers[-1].status_code != 200

    wait_until(is_refused, "its graph is traced, and wants a GPU")
    refused = answers[-1]
    assert refused.status_code == 429, refused.text
    assert "quota resident_bytes of openfaas-fn/tiny" in refused.text
    assert refused.headers["Retry-After"] == "1"
    rest.remove("tiny")


def test_stream_pauses_and_is_not_cut_off_when_its_quota_is_used_up_in_its_middle(
    up: Stack, rest: Rest, pool: ThreadPoolExecutor
) -> None:
    """Three functions stream on two GPUs: between two tokens each loses its own to another one."""
    limited, *others = "limited", "first-other", "second-other"

    def use(figure: str) -> float:
        return float(owner(up, f"openfaas-fn/{limited}")["use"][figure])

    written = write(up.work, "stream", STREAM)
    for name in (limited, *others):
        # A stream that is paused again and again takes long where all is slow.
        rest.deploy(name, annotations={**written, **GPU}, envVars={"exec_timeout": "5m"})
        learn(rest, f"{name}?count=1")
    # A token takes milliseconds of a GPU; what its lease lasts longer, without others, is free.
    quota(up, "set", f"openfaas-fn/{limited}", "--gpu-seconds", "0.05", "--window", "4")
    stream = pool.submit(rest.call, f"{limited}?count=40")
    rivals = [pool.submit(rest.call, f"{name}?count=70") for name in others * 2]
    wait_until(lambda: use("held_back") > 0, "a stream is paused")
    answers: list[httpx.Response] = []

    def is_refused() -> bool:
        """The quota may be free again before the call comes; the stream uses it up once more."""
        answers.append(rest.call(f"{limited}?count=1"))
        return answers[-1].status_code != 200

    wait_until(is_refused, "a call is refused")
    refused = answers[-1]
    assert refused.status_code == 429, refused.text
    assert f"quota gpu_s of openfaas-fn/{limited}" in refused.text
    for calls, count in (([stream], 40), (rivals, 70)):
        for call in calls:
            assert call.result().text.split() == [str(number) for number in range(count)]
    quota(up, "remove", f"openfaas-fn/{limited}")
    for name in (limited, *others):
        rest.remove(name)


def test_operators_terms_win_until_they_are_removed(up: Stack, rest: Rest) -> None:
    wanted = {**write(up.work, "gated", GATED), **GPU, "com.gpufaas.weight": "2"}
    rest.deploy("weighed", annotations=wanted)
    wait_until(lambda: owner(up, "openfaas-fn/weighed")["set_by"] == "function", "told")
    quota(up, "set", "openfaas-fn/weighed", "--leases", "3")
    assert re.search(r"^openfaas-fn/weighed +operator +2 ", quota(up, "list"), re.MULTILINE)
    (row,) = json.loads(quota(up, "list", "--json"))
    assert (row["set_by"], row["terms"]["weight"], row["terms"]["leases"]) == ("operator", 2.0, 3)
    quota(up, "remove", "openfaas-fn/weighed")
    assert owner(up, "openfaas-fn/weighed")["set_by"] == "function"
    rest.remove("weighed")


@pytest.mark.parametrize("name", ["weight", "leases"])
def test_deployment_with_a_bad_quota_is_refused_by_its_name(rest: Rest, name: str) -> None:
    said = {"service": "bad", "image": "bad:1", "annotations": {f"com.gpufaas.{name}": "none"}}
    answer = rest.ask("POST", "/system/functions", said)
    assert (answer.status_code, f"com.gpufaas.{name}" in answer.text) == (400, True)
