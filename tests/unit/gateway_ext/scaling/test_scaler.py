"""The scaler: one order at a time, wakes at once, and a provider that fails or changes its mind."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from common.telemetry.metrics import BoundedNames, page
from common.time_limits import time_limit
from gateway_ext.calls.function_table import Function, Functions
from gateway_ext.errors import ProviderFailed, UnknownFunction
from gateway_ext.model import Deployment, Endpoint, FunctionId
from gateway_ext.scaling.scaler import BELIEVED_S, SCALE_WITHIN_S, Scaler
from tests.kit.virtual_time import until, virtually

ECHO = FunctionId("openfaas-fn", "echo")
LOG = logging.getLogger("tests.scaler")
ZERO = {"com.openfaas.scale.zero": "true", "com.openfaas.scale.zero-duration": "30s"}


def now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Instances:
    """A provider's scaling: `takes_s` for an order, `starts_s` until its replicas are ready."""

    functions: Functions
    starts_s: float = 2.0
    takes_s: float = 0.5
    fails: list[Exception] = field(default_factory=list)
    asked: list[tuple[float, int]] = field(default_factory=list)
    now: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    starting: set[asyncio.Task[None]] = field(default_factory=set)

    async def scale(self, _function: FunctionId, replicas: int) -> None:
        self.asked.append((now_s(), replicas))
        self.now += 1
        assert self.now == 1, "two orders at once"
        try:
            await asyncio.sleep(self.takes_s)
            if self.fails:
                raise self.fails.pop(0)
        finally:
            self.now -= 1
        self.report(len(self.function.endpoints) if replicas else 0, wanted=replicas)
        task = asyncio.create_task(self._start(replicas))
        self.starting.add(task)
        task.add_done_callback(self.starting.discard)

    def report(self, there: int, *, wanted: int) -> None:
        deployment = Deployment(ECHO, "image", labels=self.labels)
        endpoints = [Endpoint(str(at), f"unix:/nowhere/{at}") for at in range(there)]
        self.functions.function_is(deployment, endpoints, wanted=wanted)

    @property
    def function(self) -> Function:
        found = self.functions.by_id(ECHO)
        assert found is not None
        return found

    async def _start(self, replicas: int) -> None:
        await asyncio.sleep(self.starts_s)
        self.report(replicas, wanted=replicas)


@dataclass
class Stage:
    """A scaler at work on one function."""

    scaler: Scaler
    instances: Instances
    queued: dict[FunctionId, int]

    @property
    def asked(self) -> list[tuple[float, int]]:
        return self.instances.asked


@asynccontextmanager
async def a_stage(
    replicas: int, labels: dict[str, str] = ZERO, every_s: float = 1.0
) -> AsyncIterator[Stage]:
    # The two know each other.
    functions = Functions(on_change=lambda function: scaler.changed(function))  # noqa: PLW0108
    instances = Instances(functions, labels=labels)
    queued: dict[FunctionId, int] = {}
    scaler = Scaler(
        *(functions, instances.scale, lambda one: queued.get(one, 0), now_s, LOG, every_s)
    )
    instances.report(replicas, wanted=replicas)
    instances.function.last_call_s = 0.0
    async with scaler:
        yield Stage(scaler, instances, queued)
    for task in instances.starting:
        task.cancel()
    await asyncio.gather(*instances.starting, return_exceptions=True)


async def one_call(stage: Stage) -> float:
    """As the invocation path does it: take an instance, or wake the function; then give it back."""
    function = stage.instances.function
    instance = function.take()
    if instance is None:
        stage.scaler.wake(function)
        instance = await function.turn(1000)
    took_at_s = now_s()
    function.give_back(instance)
    function.last_call_s = took_at_s
    return took_at_s


@virtually
async def test_hundred_callers_wake_a_function_with_one_order() -> None:
    async with a_stage(0) as stage:
        await until(10.3)
        came_s = await asyncio.gather(*(one_call(stage) for _ in range(100)))
        assert stage.asked == [(10.3, 1)]
        assert came_s == pytest.approx([12.8] * 100)
        shown = page(stage.scaler.families(BoundedNames(10))).decode()
        (waited,) = re.findall(r"gpufaas_gateway_wake_seconds_sum (\S+)", shown)
        assert float(waited) == pytest.approx(2.5)
        assert "gpufaas_gateway_wake_seconds_count 1.0" in shown
        wanted = f'gpufaas_gateway_replicas_wanted{{function_name="{ECHO}"}} 1.0'
        assert wanted in shown.splitlines()


@virtually
async def test_idle_function_goes_to_nothing_and_comes_back() -> None:
    async with a_stage(1) as stage:
        await until(29.9)
        assert stage.asked == []
        await until(31.0)
        assert [replicas for _, replicas in stage.asked] == [0]
        await until(100.0)
        assert len(stage.asked) == 1
        await one_call(stage)
        assert stage.asked[1:] == [(100.0, 1)]


SHORT = ZERO | {"com.openfaas.scale.zero-duration": "3s"}


async def put_to_sleep(stage: Stage) -> None:
    """Let the scaler scale the idle function to zero; its cold start is longer than `SHORT`."""
    await until(20.0)
    assert [replicas for _, replicas in stage.asked] == [0]
    stage.instances.starts_s = 20.0


async def order(stage: Stage, replicas: int) -> None:
    """As the routes do it for an administrator, or for OpenFaaS's gateway."""
    with stage.scaler.ordering(ECHO):
        await stage.instances.scale(ECHO, replicas)


@pytest.mark.parametrize("ordered", [True, False])
@virtually
async def test_replicas_of_others_stay_until_they_were_ready_and_idle(*, ordered: bool) -> None:
    """An order through the routes, or a change that the provider reports by itself."""
    async with a_stage(1, labels=SHORT) as stage:
        await put_to_sleep(stage)
        if ordered:
            await order(stage, 1)
        else:
            await stage.instances.scale(ECHO, 1)
        await until(43.0)  # ready at 40.5
        assert [replicas for _, replicas in stage.asked] == [0, 1]
        await until(46.0)
        assert [replicas for _, replicas in stage.asked] == [0, 1, 0]


@virtually
async def test_function_that_wakes_for_a_call_serves_it_whatever_its_idle_time() -> None:
    async with a_stage(1, labels=SHORT) as stage:
        await put_to_sleep(stage)
        assert await one_call(stage) == pytest.approx(40.5)
        await until(43.0)
        assert [replicas for _, replicas in stage.asked] == [0, 1]


@virtually
async def test_caller_who_leaves_during_a_cold_start_finds_the_function_ready_later() -> None:
    async with a_stage(1, labels=SHORT) as stage:
        await put_to_sleep(stage)
        with pytest.raises(TimeoutError):
            async with time_limit(1.0):
                await one_call(stage)
        await until(42.0)
        assert await one_call(stage) == pytest.approx(42.0)
        assert [replicas for _, replicas in stage.asked] == [0, 1]


@virtually
async def test_order_that_takes_long_is_not_undone_meanwhile_nor_right_after() -> None:
    async with a_stage(1, labels=SHORT) as stage:
        await until(1.0)
        with stage.scaler.ordering(ECHO):
            await until(50.0)
        assert stage.asked == []
        await until(52.0)
        assert stage.asked == []
        await until(55.0)
        assert [replicas for _, replicas in stage.asked] == [0]


@virtually
async def test_function_scaled_down_and_up_between_two_looks_counts_as_raised() -> None:
    async with a_stage(1, SHORT, every_s=10.0) as stage:
        await until(9.9)
        stage.instances.report(0, wanted=0)
        stage.instances.report(0, wanted=1)
        stage.instances.report(1, wanted=1)
        await until(10.1)
        assert stage.asked == []


@virtually
async def test_call_wakes_a_function_that_an_administrator_stops_right_after_a_wake() -> None:
    async with a_stage(0) as stage:
        await until(1.0)
        await one_call(stage)
        await order(stage, 0)
        stopped_s = now_s()
        assert await one_call(stage) == pytest.approx(stopped_s + 2.5)


@virtually
async def test_function_with_queued_jobs_is_kept_and_woken() -> None:
    async with a_stage(1) as stage:
        stage.queued[ECHO] = 1
        await until(200.0)
        assert stage.asked == []
        stage.queued.clear()
        await until(240.0)
        assert [replicas for _, replicas in stage.asked] == [0]
        stage.queued[ECHO] = 1
        await until(250.0)
        assert [replicas for _, replicas in stage.asked] == [0, 1]


@virtually
async def test_caller_who_comes_while_it_goes_to_nothing_is_served_at_once() -> None:
    async with a_stage(1) as stage:
        await until(30.2)
        assert [replicas for _, replicas in stage.asked] == [0]
        stage.instances.report(0, wanted=1)  # no endpoint, and the order is still under way
        assert await one_call(stage) == pytest.approx(33.0, abs=0.1)
        assert [replicas for _, replicas in stage.asked] == [0, 1]


@virtually
async def test_order_that_fails_is_given_again_later_and_later() -> None:
    async with a_stage(0) as stage:
        stage.instances.fails = [ProviderFailed("no"), ValueError("a bug"), ProviderFailed("no")]
        await until(10.0)
        waiting = [asyncio.create_task(one_call(stage)) for _ in range(20)]
        await asyncio.gather(*waiting)
        times_s = [at_s for at_s, _ in stage.asked]
        between_s = [later - sooner for sooner, later in pairwise(times_s)]
        assert len(times_s) == 4
        assert between_s == sorted(between_s)
        assert 1.5 <= between_s[0] <= 2.6
        assert 4.5 <= between_s[2] <= 5.6


@virtually
async def test_provider_that_never_answers_is_given_up_and_asked_again() -> None:
    async with a_stage(0) as stage:
        stage.instances.takes_s = 1e9
        stage.queued[ECHO] = 1
        await until(0.5)
        await until(SCALE_WITHIN_S + 3.0)
        assert [round(at_s) for at_s, _ in stage.asked] == [0, round(SCALE_WITHIN_S + 1.0)]


@virtually
async def test_flapping_provider_is_not_flooded() -> None:
    """It accepts every order, and then reports again that it wants no replica."""
    async with a_stage(0) as stage:
        stage.instances.starts_s = 1e9
        stage.queued[ECHO] = 1
        for at in range(60):
            await until(float(at))
            stage.instances.report(0, wanted=0)
        assert 2 <= len(stage.asked) <= 60 / BELIEVED_S + 1


@virtually
async def test_load_brings_replicas_step_by_step_and_its_end_takes_them() -> None:
    labels = {"com.openfaas.scale.target": "10", "com.openfaas.scale.proportion": "1.0"}
    async with a_stage(1, labels=labels) as stage:
        function = stage.instances.function
        function.inflight = 45
        await until(40.0)
        assert [replicas for _, replicas in stage.asked] == [2, 3, 4, 5]
        function.inflight = 15
        await until(90.0)
        assert len(stage.asked) == 4
        await until(105.0)
        assert [replicas for _, replicas in stage.asked[4:]] == [2]


@virtually
async def test_rate_is_measured_over_a_while() -> None:
    labels = {"com.openfaas.scale.target": "10", "com.openfaas.scale.type": "rps"}
    async with a_stage(1, labels=labels) as stage:
        for tenth in range(300):
            await until(tenth / 10)
            stage.instances.function.calls += 2
        assert stage.instances.function.wanted == 3  # 20 a second, 9 for each


@virtually
async def test_function_that_is_removed_is_forgotten_with_its_order() -> None:
    async with a_stage(0) as stage:
        stage.instances.fails = [UnknownFunction(ECHO)]
        stage.queued[ECHO] = 1
        await until(1.2)
        stage.instances.functions.function_gone(ECHO)
        await until(30.0)
        assert len(stage.asked) == 1
        stage.instances.report(0, wanted=0)
        await until(32.0)
        assert len(stage.asked) == 2


@virtually
async def test_function_that_cannot_be_decided_for_leaves_the_others_scaled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = FunctionId("openfaas-fn", "broken")
    async with a_stage(0) as stage:
        functions = stage.instances.functions
        functions.function_gone(ECHO)  # and comes back, behind the other one
        functions.function_is(Deployment(broken, "image"), [], wanted=0)
        stage.instances.report(0, wanted=0)
        function = functions.by_id(broken)
        assert function is not None
        healthy = function.options
        function.options = replace(healthy, scale_target=1e-200, scale_proportion=1e-200)
        stage.queued[ECHO] = 1
        await until(20.5)
        assert [replicas for _, replicas in stage.asked] == [1]
        assert [one.getMessage() for one in caplog.records if one.exc_info] == [
            f"{broken} is not scaled now"
        ]
        function.options = healthy
        stage.queued[broken] = 1
        await until(22.5)
        assert len(stage.asked) == 2
