"""A page has its own name lead to the gateway: it gets no answer in that name, on any path."""

from pathlib import Path

import pytest

from gateway_ext.errors import BadRequest
from gateway_ext.gateway import Gateway
from gateway_ext.settings import GatewaySettings
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.worlds.gateway_world import gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)

PATHS = (
    *("/", "/metrics", "/function/f", "/async-function/f", "/workflow/w", "/async-workflow/w"),
    *("/system/functions", "/system/info", "/ui", "/ui/", "/nothing"),
)
EVIL = {"headers": {"Host": "evil.example:8080"}}


async def test_gateway_on_loopback_answers_in_no_strangers_name(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        for path in PATHS:
            said = await world.get(path, **EVIL)
            assert said.status == 421, path
            assert "'evil.example:8080'" in said.body
            assert "allowed_hosts" in said.body
        for path in ("/healthz", "/readyz"):
            assert (await world.get(path, **EVIL)).status == 200
        assert (await world.get("/metrics", headers={"Host": "localhost:1"})).status == 200


async def test_gateway_answers_in_names_that_are_listed(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, allowed_hosts=("evil.example",)) as world:
        assert (await world.get("/metrics", **EVIL)).status == 200
        assert (await world.get("/metrics", headers={"Host": "other.example"})).status == 421


async def test_gateway_elsewhere_answers_in_every_name(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, listen="0.0.0.0:0") as world:
        assert (await world.get("/metrics", **EVIL)).status == 200


async def test_list_of_names_is_refused_when_one_is_no_host(tmp_path: Path) -> None:
    settings = GatewaySettings(state_dir=str(tmp_path), allowed_hosts=("http://x",))
    with pytest.raises(BadRequest, match="allowed_hosts: 'http://x' is no host"):
        Gateway(settings, MemoryProvider())
