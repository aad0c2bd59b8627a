"""Calls of GPU functions: their leases, their headers, and the release of their leases."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from gateway_ext.calls import learned
from gateway_ext.calls.function_table import CallPart
from gateway_ext.calls.invoke import Streamed, close_body
from gateway_ext.calls.learned import Learned
from gateway_ext.errors import Busy, TimedOut
from gateway_ext.model import Deployment, FunctionId
from scheduler.model.errors import (
    CallerNotAllowed,
    EventRefused,
    ModelsTooLarge,
    NoGpus,
    QueueFull,
    RequestExpired,
    RequestFailed,
    SchedulerError,
    SchedulerUnreachable,
)
from scheduler.model.values import RequestId, StandingTerms
from tests.kit.fakes.fake_function import FakeFunction, a_function, says, writes
from tests.kit.waiting import eventually
from tests.kit.worlds.calling import Gateway, a_deployment, a_gateway, answer_of

pytestmark = pytest.mark.timeout(180, func_only=True)

BERT = 64 * "b"
RESNET = 64 * "e"
USES_BERT = says(headers=f"X-Gpu-Models: {BERT}\r\n")
R = RequestId("r")


def a_gpu_deployment(**options: str) -> Deployment:
    return a_deployment("", enabled="true", **options)


async def a_learned_function(gateway: Gateway, fake: FakeFunction, **options: str) -> None:
    gateway.deploy(a_gpu_deployment(**options), fake)
    assert (await gateway.call()).status == 200
    assert not gateway.leases.asked


async def test_gpu_call_is_given_a_lease_for_the_models_of_the_call_before() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake, priority="3", batch="4", slo="2s", timeout="99s")
        answer = await gateway.call(headers=["X-Gpu-Address: mine", "X-Gpu-Within: 900"])
        assert answer.header("x-gpu-models") is None
        first, second = fake.got
        assert first.header("x-gpu-lease") is None
        assert second.header("x-gpu-lease") == "token1"
        assert second.header("x-gpu-address") == "unix:/run/n0,tcp:n0:1"
        assert all(70.0 < float(got.header("x-gpu-within") or 0) <= 99.0 for got in fake.got)
        (request,) = gateway.leases.asked
        assert (request.id, request.function) == (answer.header("x-call-id"), "openfaas-fn/echo")
        assert request.models == ("openfaas-fn/" + 20 * "b",)
        assert (request.priority, request.batch, request.slo_s) == (3, 1, 2.0)
        assert request.deadline_s is not None
        await eventually(lambda: gateway.leases.released == [1])


async def test_models_and_local_work_that_follow_a_stream_are_learned() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"
    behind = f"0\r\nx-gpu-models: {BERT}\r\nX-Gpu-Local: app.py:3 it prints\r\n\r\n".encode()
    async with a_gateway() as gateway, a_function(writes(head, 0.01, behind)) as fake:
        function = gateway.deploy(a_gpu_deployment(), fake)
        assert (await gateway.call()).body == b"hi"
        assert function.learned.lines == ("app.py:3 it prints",)
        await gateway.call()
        assert fake.got[1].header("x-gpu-lease") == "token1"


async def test_report_of_work_without_a_gpu_is_kept_until_the_next_deployment() -> None:
    line = "app.py:3 it prints; take it out"
    async with a_gateway() as gateway, a_function(says(headers=f"X-Gpu-Local: {line}\r\n")) as fake:
        function = gateway.deploy(a_gpu_deployment(), fake)
        for _ in range(2):
            assert (await gateway.call()).header("x-gpu-local") is None
            assert function.learned.lines == (line,)
        assert gateway.deploy(a_gpu_deployment(), fake).learned.lines == (line,)
        assert gateway.deploy(a_gpu_deployment(priority="2"), fake).learned.lines == ()


async def test_plain_function_is_given_no_lease() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        gateway.deploy(a_deployment(), fake)
        for _ in range(2):
            assert (await gateway.call()).header("x-gpu-models") is None
        assert not gateway.leases.asked
        assert fake.got[0].header("x-gpu-within") is None


async def test_callers_own_id_is_not_taken_for_that_of_the_request() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake)
        for _ in range(2):
            await gateway.call(headers=["X-Call-Id: same"])
        first, second = (request.id for request in gateway.leases.asked)
        assert first != second
        assert first.startswith("same~")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFull(R, "full", 9), 429),
        (RequestExpired(R, "late", None), 504),
        (ModelsTooLarge(R, "too large", 2, 1), 507),
        (NoGpus(), 503),
        (SchedulerUnreachable("no scheduler"), 503),
        (CallerNotAllowed("who", known=False), 500),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_gpu_call_is_refused_with_the_schedulers_reason(
    error: SchedulerError, status: int
) -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake)
        gateway.leases.errors.append(error)
        answer = await gateway.call()
        assert answer.status == status
        assert (answer.header("retry-after") is not None) == (status in {429, 503})
        assert len(fake.got) == 1
        assert (await gateway.call()).status == 200


@pytest.mark.parametrize(
    "error", [EventRefused(None, "unknown model"), RequestFailed(R, "not loaded")]
)
async def test_gpu_call_continues_without_lease_when_its_models_are_not_known_any_more(
    error: SchedulerError,
) -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake)
        gateway.leases.errors.append(error)
        assert (await gateway.call()).status == 200
        assert fake.got[1].header("x-gpu-lease") is None
        assert (await gateway.call()).status == 200
        assert fake.got[2].header("x-gpu-lease") == "token1"


async def test_request_is_cancelled_when_caller_leaves_or_time_is_over() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake)
        function = gateway.functions.by_path(b"echo")
        assert function is not None
        gateway.leases.open.clear()
        _, writer = await gateway.connect()
        writer.write(b"GET /function/echo HTTP/1.1\r\nhost: x\r\nx-call-id: gone\r\n\r\n")
        await eventually(lambda: len(gateway.leases.asked) == 1)
        writer.close()
        await eventually(lambda: len(gateway.leases.cancelled) == 1)
        assert gateway.leases.cancelled[0] == gateway.leases.asked[0].id
        assert function.inflight == 0
        gateway.deploy(a_gpu_deployment(timeout="30ms"), fake)
        function.learned.saw(BERT.encode())
        assert (await gateway.call()).status == 504
        await eventually(lambda: len(gateway.leases.cancelled) == 2)
        assert len(fake.got) == 1


async def test_lease_is_given_back_when_function_fails() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        gateway.leases.terms = StandingTerms(60.0, 100)
        await a_learned_function(gateway, fake)
        await fake.close()
        assert (await gateway.call()).status == 502
        await eventually(lambda: len(gateway.leases.released) == 1)
        assert len(gateway.leases.asked) == 1  # one lease, for three attempts to connect


async def test_call_that_is_repeated_asks_as_another_request_than_the_one_before() -> None:
    """What its first attempt asked for was given back, or is asked for on behalf of others."""
    async with a_gateway() as gateway, a_function(writes(close=True)) as fake:
        function = gateway.deploy(a_gpu_deployment(retry="idempotent"), fake)
        function.learned.saw(BERT.encode())
        answer = await gateway.call()
        assert answer.status == 502
        call = answer.header("x-call-id")
        assert [asked.id for asked in gateway.leases.asked] == [call, f"{call}~2", f"{call}~3"]
        await eventually(lambda: gateway.leases.released == [1, 2, 3])


async def test_lease_is_given_back_before_a_slow_caller_has_read_the_answer() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake)
        _, writer = await gateway.connect()
        writer.write(b"GET /function/echo HTTP/1.1\r\nhost: x\r\n\r\n")
        await eventually(lambda: gateway.leases.released == [1])


async def test_gpu_is_asked_for_once_the_body_has_come() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake)
        reader, writer = await gateway.connect()
        writer.write(b"POST /function/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
        await asyncio.sleep(0.1)
        assert not gateway.leases.asked
        writer.write(b"cd")
        assert (await answer_of(reader)).status == 200
        assert (fake.got[1].body, len(gateway.leases.asked)) == (b"abcd", 1)


async def test_caller_that_never_sends_its_body_is_given_no_gpu_and_told_why() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        function = gateway.deploy(a_gpu_deployment(timeout="1s"), fake)
        function.learned.saw(BERT.encode())
        reader, writer = await gateway.connect()
        writer.write(b"POST /function/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
        await asyncio.sleep(0.7)
        assert (gateway.leases.asked, function.inflight) == ([], 0)
        assert (await answer_of(reader)).status == 408
        assert not gateway.leases.asked
        assert not fake.got


async def test_body_beyond_the_buffer_goes_without_a_lease_however_slowly_it_comes() -> None:
    async with a_gateway(read_ahead_bytes=1000) as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake)
        reader, writer = await gateway.connect()
        writer.write(b"POST /function/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n")
        writer.write(b"x" * 3900)
        await eventually(lambda: len(fake.got) == 2)
        assert not gateway.leases.asked
        writer.write(b"x" * 100)
        assert (await answer_of(reader)).status == 200
        assert fake.got[1].header("x-gpu-lease") is None
        assert not gateway.leases.asked


async def test_large_body_of_an_async_call_is_here_already_and_gets_its_lease() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield 1000 * b"x"

    async with a_gateway(read_ahead_bytes=1000) as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake)
        answer = await gateway.invoke.direct(
            "POST", b"/function/echo", b"", [], Streamed(4000, pieces())
        )
        assert answer.status == 200
        async for _ in answer.body:
            pass
        assert fake.got[1].header("x-gpu-lease") == "token1"


async def test_caller_that_never_sends_its_body_takes_none_of_few_places() -> None:
    async with a_gateway() as gateway, a_function(says()) as fake:
        function = gateway.deploy(a_deployment(concurrency="1"), fake)
        _, writer = await gateway.connect()
        writer.write(b"POST /function/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
        await eventually(lambda: function.calls == 1)
        assert (await gateway.call(body=b"whole")).status == 200


async def test_longest_wait_is_passed_on_to_the_scheduler() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake, **{"max-wait": "3s"})
        await gateway.call()
        gateway.deploy(a_gpu_deployment(**{"max-wait": "0"}), fake)
        for _ in range(2):
            assert (await gateway.call()).status == 200
        assert [request.max_wait_s for request in gateway.leases.asked] == [3.0, 30.0]


async def test_scheduler_is_not_asked_again_while_its_queue_is_known_to_be_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake, **{"max-wait": "5s"})
        gateway.leases.errors.append(QueueFull(R, "full", 9, 5.1))
        assert (await gateway.call()).status == 429
        await asyncio.sleep(0.1)
        assert (await gateway.call()).status == 200
        assert len(gateway.leases.asked) == 2
        monkeypatch.setattr(learned, "_MOST_CLOSED_S", 60.0)  # as long as the test may take
        gateway.leases.errors.append(QueueFull(R, "full", 9, 65.4))
        first, second = await gateway.call(), await gateway.call()
        assert [first.status, second.status] == [429, 429]
        assert [first.header("retry-after"), second.header("retry-after")] == ["66", "66"]
        assert len(gateway.leases.asked) == 3


async def test_models_are_forgotten_when_function_is_updated() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake)
        gateway.deploy(a_gpu_deployment(priority="1"), fake)
        await gateway.call()
        assert not gateway.leases.asked


def test_declared_models_are_expected_from_the_first_call() -> None:
    learned = Learned(FunctionId("n", "f"), (BERT, "resnet50"))
    assert learned.models == ("n/" + 20 * "b",)


def test_only_models_that_every_recent_call_used_are_expected() -> None:
    learned = Learned(FunctionId("n", "f"))

    def expected_after(answer: str) -> list[str]:
        learned.saw(answer.encode())
        return [model[2] for model in learned.models]

    both = f"{BERT}, {RESNET}"
    assert expected_after(both) == ["b", "e"]
    assert expected_after(RESNET) == ["e"]
    assert [expected_after(both) for _ in range(4)] == [["e"], ["e"], ["e"], ["b", "e"]]
    assert expected_after("no digest") == ["b", "e"]
    assert expected_after(64 * "c") == []


async def test_stage_of_a_workflow_is_asked_for_with_its_names_and_its_time() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        wishes = {"slo": "2s", "timeout": "99s", "max-wait": "30s"}
        await a_learned_function(gateway, fake, **wishes)
        part = CallPart("w.openfaas-fn", "first", within_s=20.0, slo_s=0.5)
        answer = await gateway.invoke.direct("POST", b"/function/echo", b"", [], b"", part)
        assert answer.status == 200
        await close_body(answer.body)
        (request,) = gateway.leases.asked
        assert (request.application, request.stage) == ("w.openfaas-fn", "first")
        assert (request.slo_s, request.max_wait_s) == (0.5, 20.0)
        assert request.deadline_s is not None
        assert request.deadline_s <= time.monotonic() + 20.0


async def test_later_stage_may_wait_as_long_as_its_workflow_and_is_not_refused() -> None:
    async with a_gateway() as gateway, a_function(USES_BERT) as fake:
        await a_learned_function(gateway, fake, timeout="9s")
        function = gateway.functions.by_path(b"echo")
        assert function is not None
        first = CallPart("w", "first", within_s=40.0)
        later = CallPart("w", "second", within_s=40.0, later=True)
        for part in (first, later):
            answer = await gateway.invoke.direct("POST", b"/function/echo", b"", [], b"", part)
            await close_body(answer.body)
        assert [request.max_wait_s for request in gateway.leases.asked] == [4.5, 40.0]
        function.waits.saw_full_gpus(6.0, 4.5, time.monotonic() + 60.0)  # it holds for a second
        with pytest.raises(Busy):
            await gateway.invoke.direct("POST", b"/function/echo", b"", [], b"", first)
        answer = await gateway.invoke.direct("POST", b"/function/echo", b"", [], b"", later)
        assert answer.status == 200
        await close_body(answer.body)


async def test_stage_waits_for_a_start_no_longer_than_it_may_take() -> None:
    async with a_gateway() as gateway:
        gateway.deploy(a_deployment("9s"), wanted=0)
        part = CallPart("w", "first", within_s=0.05)
        with pytest.raises(TimedOut, match=r"0\.05 s"):
            await gateway.invoke.direct("POST", b"/function/echo", b"", [], b"", part)
