"""One test of MLPerf LoadGen's server scenario; runs by the Python that has LoadGen.

Standard input has the plan as JSON, standard output what was answered. LoadGen decides when a
query is due and what its latency was; the calls are made by the client of `bench.load`.
"""

import asyncio
import json
import sys
import time
from typing import Any

import mlperf_loadgen as loadgen  # type: ignore[import-not-found]  # in an environment of its own
import uvloop

from bench.load.http_callers import DueCall, GatewayCalls, target_at

_CONNECTIONS = 256
_TIMEOUT_S, _LOOK_S = 30.0, 0.25
_PERCENTILE = 0.99
_OK_FROM, _OK_TO = 200, 300


class QueryCalls:
    """Makes a call for each query, over connections that stay open, and reports its end."""

    def __init__(self, url: str, calls: list[bytes]) -> None:
        self.failed = 0
        self.answers: set[tuple[int, int, bytes]] = set()  # each different one once
        self._loop = asyncio.get_running_loop()
        self._calls = GatewayCalls(
            target_at(url),
            calls,
            self._ended,
            most=_CONNECTIONS,
            timeout_s=_TIMEOUT_S,
            on_answer=lambda *answer: self.answers.add(answer),
        )

    def issue(self, samples: list[Any]) -> None:
        """Send these queries; LoadGen calls this in a thread of its own."""
        now_s = time.monotonic()
        for sample in samples:
            call = DueCall(sample.index, now_s, sample.id)
            self._loop.call_soon_threadsafe(self._calls.call, call)

    async def watch(self) -> None:
        """End calls that are not answered in time."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._calls.end_overdue()

    async def close(self) -> None:
        """Close all connections."""
        await self._calls.close()

    def _ended(self, call: DueCall, status: int, _reason: str) -> None:
        self.failed += not _OK_FROM <= status < _OK_TO
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(call.number, 0, 0)])


async def _test(plan: dict[str, Any]) -> dict[str, object]:
    calls = QueryCalls(plan["url"], [call.encode() for call in plan["calls"]])
    watching = asyncio.create_task(calls.watch())
    system = loadgen.ConstructSUT(calls.issue, _nothing)
    library = loadgen.ConstructQSL(len(plan["calls"]), len(plan["calls"]), _nothing, _nothing)
    settings = _settings(plan), _log_settings(plan["folder"])
    await asyncio.to_thread(loadgen.StartTestWithLogSettings, system, library, *settings)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await calls.close()
    answers = [(number, status, body.decode()) for number, status, body in calls.answers]
    return {"failed": calls.failed, "answers": answers}


def _nothing(*_: object) -> None:
    """Nothing is left to send, and samples need no loading."""


def _settings(plan: dict[str, Any]) -> Any:
    settings = loadgen.TestSettings()
    settings.scenario = loadgen.TestScenario.Server
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.server_target_qps = plan["rate"]
    settings.server_target_latency_ns = round(1e9 * plan["latency_s"])
    settings.server_target_latency_percentile = _PERCENTILE
    settings.min_duration_ms = round(1e3 * plan["seconds"])
    settings.min_query_count = plan["queries"]
    return settings


def _log_settings(folder: str) -> Any:
    output, settings = loadgen.LogOutputSettings(), loadgen.LogSettings()
    output.outdir = folder
    settings.log_output = output
    settings.enable_trace = False
    return settings


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(_test(json.load(sys.stdin)))))
