"""Traces at the scheduler's HTTP: taken from headers, shown by request."""

import logging
from collections.abc import Awaitable, Callable

import pytest

from common.telemetry.traces import Span, TraceContext
from gpufaas.log_format import JsonLines
from scheduler.model.values import RequestId
from scheduler.service.history.history import spans_of
from tests.kit.cores.builders import request
from tests.kit.worlds.service_world import World, leading

pytestmark = pytest.mark.timeout(180, func_only=True)

TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)


def whole(world: World, name: str) -> Span:
    assert world.office is not None
    record = world.office.history.get(RequestId(name))
    assert record is not None
    return spans_of(record, world.office.clock.now_s())[0]


async def ask_over_http(world: World, name: str, trace: TraceContext | None) -> None:
    headers = {"traceparent": trace.header, "tracestate": trace.state} if trace else {}
    await world.release((await world.acquire(name, headers=headers)).body["lease"])


async def ask_over_a_stream(world: World, name: str, trace: TraceContext | None) -> None:
    async with world.leases() as client:
        client.release((await client.acquire(request(name), trace)).placement.lease)


@pytest.mark.parametrize("ask", [ask_over_http, ask_over_a_stream])
async def test_request_belongs_to_the_trace_that_came_with_it(
    ask: Callable[[World, str, TraceContext | None], Awaitable[None]],
) -> None:
    async with leading() as world:
        traced = TRACE._replace(state="a=1")
        await ask(world, "r0", traced)
        await ask(world, "r1", None)
        await ask(world, "r2", traced._replace(span_id=16 * "c"))
        assert (whole(world, "r0").trace_id, whole(world, "r0").parent_id) == TRACE[:2]
        assert whole(world, "r1").trace_id == 32 * "0"
        assert whole(world, "r2").parent_id == 16 * "c"


async def test_spans_of_a_request_are_shown() -> None:
    async with leading() as world:
        await world.acquire("a/b c")
        found = await world.get("/traces/a%2Fb%20c")
        assert {span["name"] for span in found.body["spans"]} == {
            *("schedule", "queue", "decision", "held", "load"),
        }
        assert (await world.get("/traces/none")).status == 404
        metrics = (await world.get("/metrics")).body
        assert 'gpufaas_scheduler_trace_spans_total{result="sent"} 0.0' in metrics


async def test_invalid_trace_costs_no_request() -> None:
    async with leading() as world:
        body = {"request": "r0", "function": "f", "models": ["bert"]}
        answer = await world.ask("POST", "/acquire", body, headers={"traceparent": "nonsense"})
        assert answer.status == 200
        assert whole(world, "r0").trace_id == 32 * "0"


async def test_lines_written_for_a_request_name_it_and_its_trace() -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    log, keep = logging.getLogger("scheduler"), Keep()
    keep.setFormatter(JsonLines())
    log.addHandler(keep)
    before = log.level
    log.setLevel(logging.DEBUG)
    try:
        async with leading() as world:
            await ask_over_http(world, "r0", TRACE)
    finally:
        log.removeHandler(keep)
        log.setLevel(before)
    placed = [line for line in lines if "lease" in line and '"request": "r0"' in line]
    assert placed
    assert all(f'"trace_id": "{TRACE.trace_id}"' in line for line in placed)
