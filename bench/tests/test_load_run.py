"""`python -m bench.load` against a gateway, and against servers that behave badly."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from bench.load.__main__ import main
from bench.load.arrivals import Choices
from bench.load.http_callers import NO_ANSWER, DueCall, GatewayCalls, target_at
from bench.load.load_run import LoadOutcome, TrafficPlan, run
from bench.load.pacing import PreciseTimer
from gateway_ext.model import Deployment
from gpufaas.options.shared import cluster_secret
from gpufaas.stack.held_ports import HeldPort
from tests.kit.fakes.fake_function import Behaviour, FakeFunction, a_function, says
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.waiting import PATIENCE_S, eventually
from tests.kit.worlds.gateway_world import gateway_world

Output = pytest.CaptureFixture[str]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Instance:
    """A fake function that ends when its provider says so."""

    def __init__(self, behaviour: Behaviour, name: str) -> None:
        self._context = a_function(behaviour, name)
        self.fake: FakeFunction

    async def begin(self) -> "Instance":
        self.fake = await self._context.__aenter__()
        self.endpoint = self.fake.endpoint
        return self

    async def close(self) -> None:
        await self._context.__aexit__(None, None, None)


def at(url: str, functions: str) -> list[str]:
    """The command for a gateway beside which there is no scheduler."""
    cluster_secret("secret", {}, make=True)
    nowhere = ["--scheduler", "http://127.0.0.1:9", "--secret-file", "secret"]
    return ["--gateway", url, "--functions", functions, *nowhere]


def a_plan(url: str, **more: object) -> TrafficPlan:
    target = target_at(url)
    usual: dict[str, object] = {
        "target": target,
        "functions": ("f",),
        "requests": [target.request("f", b"hi", "text/plain")],
        "seconds": 0.5,
        "timeout_s": PATIENCE_S,
    }
    return TrafficPlan(**usual | more)  # type: ignore[arg-type]  # a test's own fields


async def a_run(plan: TrafficPlan, stop: asyncio.Event | None = None) -> LoadOutcome:
    return await run(plan, stop or asyncio.Event(), lambda _outcome, _in_flight: None)


@asynccontextmanager
async def a_server(serve: Serve) -> AsyncIterator[str]:
    """Serves every connection like this; a caller may leave at any time."""
    serving: set[asyncio.Task[None] | None] = set()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*(task for task in serving if task is not None))


@contextmanager
def a_gateway(folder: Path, behaviour: Behaviour) -> Iterator[str]:
    """A gateway with the function `f`, in a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    up: asyncio.Future[str] = loop.create_future()
    ended = asyncio.Event()
    ready = threading.Event()

    async def start(deployment: Deployment, name: str) -> Instance:
        return await Instance(behaviour, f"{deployment.id.name}-{name}").begin()

    async def serve() -> None:
        async with gateway_world(folder, MemoryProvider(start)) as world:
            assert (await world.deploy("f")).status == 202
            up.set_result(world.gateway.url)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S), "the gateway is up"
        yield up.result()
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


# -- the command ----------------------------------------------------------------------------------


def test_load_measures_a_gateway_when_clients_call_again(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    got: list[bytes] = []

    async def behave(one: object, writer: asyncio.StreamWriter) -> None:
        await says(b"ok")(one, writer)  # type: ignore[arg-type]  # what `a_function` hands over
        got.append(one.body)  # type: ignore[attr-defined]

    (tmp_path / "body").write_text('{"a": 1}')
    options = ["--clients", "4", "--seconds", "1", "--body", "@body", "--json", "--out", "pictures"]
    with a_gateway(tmp_path, behave) as url:
        code = main([*at(url, "f,gone"), *options])

    content = capsys.readouterr()
    found = json.loads(content.out)
    assert code == 0
    assert found["functions"]["f"]["statuses"] == {"200": len(got)}
    assert set(found["functions"]["gone"]["statuses"]) == {"404"}
    assert found["calls"] == found["functions"]["f"]["calls"] + found["functions"]["gone"]["calls"]
    assert set(got) == {b'{"a": 1}'}
    assert (found["cache"], found["unfinished"]) == (None, 0)
    assert "no scheduler answers" in content.err
    assert Path(found["picture"]).stat().st_size > 0
    assert [why for why in found["reasons"] if why.startswith("404: ")], found["reasons"]


def test_load_fails_when_nothing_went_well(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    why = b"call 0c2f-11aa-9bd3 failed: no room\nand more"
    got: list[str | None] = []

    async def behave(one: object, writer: asyncio.StreamWriter) -> None:
        await says(why, 500)(one, writer)  # type: ignore[arg-type]  # what `a_function` hands over
        got.append(dict(one.headers).get("x-mark"))  # type: ignore[attr-defined]

    with a_gateway(tmp_path, behave) as url:
        options = ["--rate", "20", "--seconds", "0.5", "-H", "X-Mark: it: is"]
        code = main([*at(url, "f"), *options])

    assert code == 1
    said = capsys.readouterr().out
    assert "x 500" in said
    assert "x 500: call ... failed: no room\n" in said
    assert set(got) == {"it: is"}
    assert not (tmp_path / "out").exists()  # no picture unasked


def test_load_reports_in_one_line_that_no_gateway_answers(capsys: Output) -> None:
    code = main(["--gateway", "http://127.0.0.1:9", "--functions", "f", "--rate", "1"])

    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("bench.load: no gateway answers at http://127.0.0.1:9: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rate", "1", "--clients", "2"], "--clients is a load of its own"),
        ([], "how much load"),
        (["--rate", "0"], "--rate must be more than 0, not 0"),
        (["--clients", "-1"], "--clients must be more than 0, not -1"),
        (["--rate", "1", "--seconds", "nan"], "--seconds must be more than 0"),
        (["--rate", "1", "--popularity", "x"], "popularity 'x'"),
        (["--rate", "1", "--body", "no/such"], "--body no/such"),
        (["--rate", "1", "--body", "@no/such"], "--body @no/such"),
        (["--rate", "1", "-H", "X-Mark"], "NAME: VALUE is expected"),
        (["--rate", "1", "-H", "a b: c"], "--header 'a b: c': NAME: VALUE is expected"),
        (["--rate", "1", "-H", "a: b\r\nc: d"], "NAME: VALUE is expected"),
        (["--rate", "1", "-H", "Content-Length: 0"], "frames a body"),
        (["--rate", "1", "--gateway", "127.0.0.1:8080"], "is no http:// or https:// URL"),
        (["--trace", "no/such.csv"], "no/such.csv"),
        (["--trace", "azure", "--popularity", "zipf"], "its own popularity"),
    ],
)
def test_load_refuses_options_that_mean_nothing(
    arguments: list[str], complaint: str, capsys: Output
) -> None:
    assert main(["--functions", "f", *arguments]) == 2
    assert complaint in capsys.readouterr().err


# -- the generator --------------------------------------------------------------------------------


async def _hi(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers everything with the number of the connection's call."""
    while True:
        await reader.readuntil(b"\r\n\r\nhi")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


async def test_answers_are_given_with_their_call_and_status_when_somebody_reads_them() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            body = await reader.readexactly(2)
            status = b"429 Too Many Requests" if body == b"no" else b"200 OK"
            head = b"HTTP/1.1 " + status + b"\r\nContent-Length: 8\r\n\r\n"
            writer.write(head + b"the ")
            await writer.drain()
            writer.write(body + b"!!")

    answers: list[tuple[int, int, bytes]] = []
    async with a_server(serve) as url:
        requests = [target_at(url).request("f", body, "text/plain") for body in (b"hi", b"no")]
        plan = a_plan(
            url,
            functions=("hi", "no"),
            requests=requests,
            clients=1,
            choices=iter([0, 1, 0]),
            on_answer=lambda *answer: answers.append(answer),
        )
        await a_run(plan)

    assert answers == [(0, 200, b"the hi!!"), (1, 429, b"the no!!"), (0, 200, b"the hi!!")]


async def test_refusals_are_told_with_when_to_come_again() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            body = await reader.readexactly(2)
            status, more = {
                b"hi": (b"200 OK", b"Retry-After: 9\r\n"),
                b"no": (b"429 Too Many Requests", b"retry-after: 3\r\n"),
                b"ex": (b"503 Service Unavailable", b""),
            }[body]
            writer.write(b"HTTP/1.1 " + status + b"\r\n" + more + b"Content-Length: 2\r\n\r\nxx")

    refusals: list[tuple[int, int, str]] = []
    async with a_server(serve) as url:
        bodies = (b"hi", b"no", b"ex")
        plan = a_plan(
            url,
            functions=("hi", "no", "ex"),
            requests=[target_at(url).request("f", body, "text/plain") for body in bodies],
            clients=1,
            choices=iter([1, 0, 2]),
            on_refusal=lambda *refusal: refusals.append(refusal),
        )
        await a_run(plan)

    assert refusals == [(1, 429, "3"), (2, 503, "")]


async def test_open_loop_counts_the_wait_from_when_a_call_was_due() -> None:
    """A server that takes nothing for a while is slow for all calls that were due meanwhile."""

    async def work() -> LoadOutcome:
        turn = asyncio.Lock()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with turn:
                await reader.readuntil(b"\r\n\r\nhi")
                await asyncio.sleep(0.1)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
                await writer.drain()

        async with a_server(slow) as url:
            return await a_run(a_plan(url, arrivals=[(0.0, 0), (0.02, 0), (0.04, 0)]))

    outcome = await work()

    assert outcome.tally.figures().statuses == {"200": 3}
    shortest, second, longest = sorted(outcome.tally.latency_s)
    assert shortest >= 0.1
    assert second >= 0.18
    assert longest >= 0.26


async def test_closed_loop_keeps_as_many_calls_in_flight_as_clients() -> None:
    async def work() -> tuple[LoadOutcome, int]:
        here = most = 0
        all_clients = asyncio.Barrier(5)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal here, most
            while True:
                await reader.readuntil(b"\r\n\r\nhi")
                here += 1
                most = max(most, here)
                await all_clients.wait()  # for ever, if there were fewer
                here -= 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        async with a_server(serve) as url:
            plan = a_plan(url, clients=5, choices=iter([0] * 30), seconds=60.0)
            return await a_run(plan), most

    outcome, most = await work()

    assert most == 5
    assert len(outcome.tally) == outcome.tally.begun == 30
    assert outcome.tally.figures().succeeded == outcome.tally.begun


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "the gateway: it closed the connection"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
            "the gateway: it closed the connection",
        ),
        (b"nonsense\r\n\r\n", "the gateway: it sent no valid HTTP"),
    ],
)
async def test_an_answer_that_is_none_is_counted_with_its_reason(
    answer: bytes, reason: str
) -> None:
    async def work() -> LoadOutcome:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\nhi")
            writer.write(answer)

        async with a_server(serve) as url:
            return await a_run(a_plan(url, arrivals=[(0.0, 0), (0.01, 0)]))

    outcome = await work()

    assert outcome.tally.figures().statuses == {"no answer": 2}
    assert outcome.tally.reasons.total() == 2
    assert all(why.startswith(reason) for why in outcome.tally.reasons)


async def test_a_call_that_is_not_answered_in_time_ends() -> None:
    async def work() -> LoadOutcome:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            del writer
            await reader.read()

        async with a_server(silent) as url:
            return await a_run(a_plan(url, arrivals=[(0.0, 0)], timeout_s=0.2))

    outcome = await work()

    assert dict(outcome.tally.reasons) == {"the gateway: no answer within 0.2 s": 1}
    assert outcome.elapsed_s < 30.0


async def test_a_gateway_that_goes_away_fails_calls_and_ends_nothing_early() -> None:
    with HeldPort() as left:
        plan = a_plan(left.url, clients=2, choices=Choices([1.0], 1), seconds=1.0)
        outcome = await a_run(plan)

    assert set(outcome.tally.figures().statuses) == {"no answer"}
    assert 2 <= len(outcome.tally) <= 20, "it asks again, but not without pause"


async def test_calls_that_wait_for_a_connection_end_when_none_can_be_made() -> None:
    ended: list[int] = []
    with HeldPort() as left:
        target = target_at(left.url)
        calls = GatewayCalls(
            target,
            [target.request("f", b"hi", "text/plain")],
            lambda _call, status, _reason: ended.append(status),
            most=1,
            timeout_s=PATIENCE_S,
        )
        for _ in range(3):
            calls.call(DueCall(0, 0.0))
        await eventually(lambda: len(ended) == 3)
        await calls.close()

    assert ended == [NO_ANSWER] * 3


async def test_what_came_so_far_is_kept_when_it_is_stopped() -> None:
    async def work() -> LoadOutcome:
        stop = asyncio.Event()

        def stop_at_two(outcome: LoadOutcome, _in_flight: int) -> None:
            if len(outcome.tally) == 2:
                stop.set()

        async with a_server(_hi) as url:
            plan = a_plan(url, arrivals=[(0.0, 0), (0.05, 0), (60.0, 0)])
            return await run(plan, stop, stop_at_two)

    outcome = await work()

    assert outcome.stopped
    assert outcome.tally.figures().statuses == {"200": 2}


async def test_the_clock_rings_not_before_its_time_and_soon_after() -> None:
    async def late_s() -> float:
        rang: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        clock = PreciseTimer(lambda: rang.set_result(time.monotonic()))
        try:
            at_s = time.monotonic() + 0.05
            clock.set(at_s + PATIENCE_S)
            clock.set(at_s)
            return await rang - at_s
        finally:
            clock.close()

    found = [await late_s() for _ in range(10)]
    assert all(0.0 <= each < PATIENCE_S for each in found)
    assert min(found) < 1.0  # the machine may be busy at some of these moments


async def test_closed_loop_ends_when_there_is_no_choice_left() -> None:
    async def work() -> LoadOutcome:
        async with a_server(_hi) as url:
            return await a_run(a_plan(url, clients=3, choices=iter([0] * 7), seconds=60.0))

    assert (await work()).tally.figures().statuses == {"200": 7}
