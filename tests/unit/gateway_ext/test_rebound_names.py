"""A page has its own name lead to the gateway: it gets no answer in that name, on any path."""

from pathlib import Path

import pytest
import yaml

from gateway_ext.errors import BadRequest, WrongHost
from gateway_ext.gateway import Gateway
from gateway_ext.settings import GatewaySettings
from gateway_ext.sites import AnsweredHosts, HostNames
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.places import ROOT
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


LOOPBACK = (
    *("localhost", "LOCALHOST.:1", "f.localhost:80", "f.localhost.", "127.1", "127.0.0.9:1"),
    *("[::1]", "[::ffff:127.0.0.1]:1", "[::FFFF:7f00:1]"),
)
ELSEWHERE = ("notlocalhost", "localhost.example", "localhost..", "[::ffff:10.0.0.1]", "127.example")


@pytest.mark.parametrize("listen", ["127.0.0.1:80", "[::1]:80", "[::ffff:127.0.0.1]:80"])
def test_loopback_has_several_names(listen: str) -> None:
    hosts = AnsweredHosts(listen, HostNames(), HostNames())
    assert not hosts.every
    for name in LOOPBACK:
        hosts.check(name.encode())
    for name in ELSEWHERE:
        with pytest.raises(WrongHost):
            hosts.check(name.encode())


@pytest.mark.parametrize("name", LOOPBACK)
def test_loopbacks_names_need_no_listing_elsewhere(name: str) -> None:
    hosts = AnsweredHosts("0.0.0.0:80", HostNames(["gateway", "localhost"]), HostNames())
    hosts.check(b"gateway:8080")
    if name != "127.1":  # no browser sends an address so
        hosts.check(name.encode())


@pytest.mark.parametrize(
    ("listen", "shown"),
    [("[::ffff:127.0.0.1]:80", True), ("localhost:0", True), ("0.0.0.0:80", False)],
)
def test_texts_of_errors_are_shown_where_the_gateway_listens_on_loopback(
    listen: str, *, shown: bool
) -> None:
    assert GatewaySettings(listen=listen).shows_errors is shown


def test_functions_of_compose_reach_the_gateway_whatever_further_names_are_set() -> None:
    gateway = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["gateway"]
    listed = gateway["environment"]["GPUFAAS_GATEWAY_ALLOWED_HOSTS"]
    assert listed.startswith("gateway,${ALLOWED_HOSTS:-")


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
