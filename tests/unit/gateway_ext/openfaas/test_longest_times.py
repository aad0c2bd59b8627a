"""What a function asks for has an end: its time-out the operator's, all else a day."""

import logging
from pathlib import Path

import pytest

from gateway_ext.errors import BadRequest
from gateway_ext.gateway import Gateway
from gateway_ext.model import DEFAULT_NAMESPACE, Deployment, FunctionId
from gateway_ext.openfaas import function_options
from gateway_ext.settings import GatewaySettings
from tests.kit.fakes.memory_provider import MemoryFunction, MemoryProvider
from tests.kit.worlds.gateway_world import gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)

F = FunctionId(DEFAULT_NAMESPACE, "f")
HUGE = "1" + 30 * "0"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"annotations": {"com.gpufaas.timeout": "99999999999"}}, "longest_timeout_s"),
        (
            {"annotations": {"com.gpufaas.timeout": "3601"}},
            "at most 3600 s, by the operator's longest_timeout_s",
        ),
        ({"labels": {"com.gpufaas.timeout": "10h"}}, "longest_timeout_s"),
        ({"envVars": {"exec_timeout": "10h"}}, "longest_timeout_s"),
        ({"annotations": {"com.openfaas.scale.zero-duration": HUGE}}, "at most 86400 s"),
        ({"labels": {"com.gpufaas.max-wait": HUGE}}, "at most 86400 s"),
        ({"annotations": {"com.gpufaas.slo": "25h"}}, "at most 86400 s"),
    ],
)
async def test_deployment_is_refused_when_its_times_are_too_long(
    tmp_path: Path, asked: dict[str, object], said: str
) -> None:
    async with gateway_world(tmp_path) as world:
        refused = await world.deploy("f", **asked)
        assert (refused.status, said in refused.body) == (400, True)
        allowed = {"com.gpufaas.timeout": "1h", "com.gpufaas.max-wait": "24h"}
        assert (await world.deploy("f", annotations=allowed)).status == 202
        body = {"service": "f", "image": "i"} | asked
        assert (await world.ask("PUT", "/system/functions", body)).status == 400


async def test_longer_timeout_is_allowed_when_the_operator_allows_it(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, longest_timeout_s=86_400.0) as world:
        assert (await world.deploy("f", envVars={"exec_timeout": "10h"})).status == 202
        found = world.gateway.functions.by_id(F)
        assert found is not None
        assert found.options.timeout_s == 36_000.0


async def test_stored_function_starts_with_the_longest_timeout_when_its_own_is_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    provider = MemoryProvider()
    labels = {"com.gpufaas.timeout": "99999999999", "com.openfaas.scale.zero-duration": HUGE}
    provider.running[F] = MemoryFunction(Deployment(F, "i", labels=labels))
    with caplog.at_level(logging.WARNING):
        async with gateway_world(tmp_path, provider) as world:
            found = world.gateway.functions.by_id(F)
            assert found is not None
            assert found.options.timeout_s == 3600.0
            assert found.options.scale_zero_after_s == 86_400.0
    (line,) = caplog.messages
    assert line.startswith("f.openfaas-fn: its time-out of 1e+11 s is cut to 3600 s")


def test_a_wait_of_any_length_is_one_of_a_day() -> None:
    given = Deployment(F, "i", environment={"max_wait": HUGE})
    assert function_options.of(given).max_wait_s == 86_400.0


@pytest.mark.parametrize("name", ["timeout_s", "longest_timeout_s"])
@pytest.mark.parametrize("time_s", [0.0, 86_401.0, float("nan")])
def test_gateway_refuses_settings_when_a_time_limit_is_no_time_of_a_day(
    tmp_path: Path, name: str, time_s: float
) -> None:
    settings = GatewaySettings(state_dir=str(tmp_path), **{name: time_s})  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=name):
        Gateway(settings, MemoryProvider())


def test_gateway_refuses_settings_when_the_default_time_limit_exceeds_the_longest(
    tmp_path: Path,
) -> None:
    settings = GatewaySettings(state_dir=str(tmp_path), timeout_s=7200.0, longest_timeout_s=3600.0)
    with pytest.raises(BadRequest, match="timeout_s: 7200: at most longest_timeout_s, 3600"):
        Gateway(settings, MemoryProvider())
