"""The docker provider on an Engine that misbehaves."""

from pathlib import Path

import pytest

from gateway_ext.errors import (
    BadDeployment,
    ProviderFailed,
    UnknownFunction,
    UnknownNamespace,
)
from gateway_ext.model import Deployment, FunctionId, Namespace
from gateway_ext.ports import LogQuery
from gateway_ext.providers.http_api import ServerAway
from tests.kit.processes.process_functions import store_otherwise
from tests.kit.waiting import eventually
from tests.unit.gateway_ext.providers.docker.docker_world import F, Told, world


async def test_function_is_replaced_when_its_container_dies(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (first,) = await there.ready()
        there.engine.dies(first, 137, OOMKilled=True)
        await there.trouble("it took more memory than it may")
        await there.replaced(first)
        assert first not in there.engine.containers


async def test_death_is_noticed_when_its_event_was_missed(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (first,) = await there.ready()
        there.engine.containers[first]["State"] = {"Running": False, "ExitCode": 9}
        there.engine.break_off()
        await there.trouble("exited with status 9")


async def test_function_is_replaced_when_its_container_is_removed(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (first,) = await there.ready()
        del there.engine.containers[first]
        there.engine.break_off()
        await there.trouble("another program removed it")
        await there.ready()


async def test_nothing_is_left_when_a_container_cannot_be_started(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        there.engine.failing["POST networks/create"] = (500, "no more addresses")
        there.engine.failing["GET networks/gpufaas-functions"] = (404, "no such network")
        await there.deploy()
        await there.trouble("cannot be started: no more addresses")
        assert there.engine.containers == {}
        there.engine.failing.clear()
        await there.ready()


async def test_engine_away_is_reported_and_functions_are_there_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (first,) = await there.ready()
        await there.engine.stop()
        with pytest.raises(ServerAway, match="the Docker Engine at unix://"):
            await there.deploy(update=True)
        await there.provider.scale(F, 2)
        assert await there.ready() == [first]  # it may run still
        await there.engine.start()
        assert first in await there.ready(2)


async def test_gateway_starts_when_the_engine_is_away(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (first,) = await there.ready()
        await there.provider.close()
        await there.engine.stop()
        await there.another().start(there.heard)
        assert there.heard.endpoints[F] == []
        await there.provider.scale(F, 2)
        await there.engine.start()
        assert first in await there.ready(2)


async def test_function_serves_on_while_it_is_updated(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        there.engine.images["f:2"] = {"Id": "sha256:2", "Config": {"Labels": None}}
        await there.deploy()
        (first,) = await there.ready()
        await there.deploy("f:2", update=True)
        await eventually(lambda: first not in there.engine.containers)
        (second,) = await there.ready()
        assert there.engine.bodies[second]["Image"] == "sha256:2"
        assert there.heard.least[F] == 1


async def test_containers_of_removed_functions_go_and_others_stay(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        await there.ready()
        await there.provider.remove(F)
        await eventually(lambda: not there.engine.containers)
        assert there.heard.gone == [F]
        with pytest.raises(UnknownFunction):
            await there.provider.scale(F, 1)


async def test_gpu_function_is_replaced_when_its_manager_is_another_one(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.provider.close()
        await there.another(Told("tcp:one:1")).start(there.heard)
        await there.deploy(labels={"com.gpufaas.enabled": "true"})
        (first,) = await there.ready()
        await there.provider.close()
        await there.another(Told("tcp:one:1", "A100")).start(there.heard)
        assert await there.ready() == [first]
        await there.provider.close()
        await there.another(Told("tcp:two:1")).start(there.heard)
        await eventually(lambda: first not in there.engine.containers)
        (second,) = await there.ready()
        assert "GPUFAAS_ADDRESS=tcp:two:1" in there.engine.bodies[second]["Env"]
        assert there.heard.least[F] == 1


async def test_other_functions_start_when_what_is_stored_of_one_is_refused_by_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as there:
        await there.provider.close()
        await there.another(Told("tcp:one:1")).start(there.heard)
        other = FunctionId("openfaas-fn", "other")
        labels = {"com.gpufaas.enabled": "true", "com.openfaas.scale.target": "5"}
        await there.deploy(labels=labels)
        (first,) = await there.ready()
        await there.provider.deploy(Deployment(other, "f:1"), update=False)
        await eventually(lambda: there.heard.endpoints.get(other), "the other one")
        await there.provider.close()
        store_otherwise(tmp_path / "state" / "containers", F, '"5"', '"+5"')
        await there.another(Told("tcp:one:1")).start(there.heard)
        await eventually(lambda: there.heard.endpoints.get(other), "the other one is there again")
        assert F not in there.heard.endpoints
        await there.trouble("deploy it again")
        assert "f.openfaas-fn: it is not served: com.openfaas.scale.target: '+5'" in caplog.text
        await there.deploy(labels=labels, update=True)
        await there.ready()
        await eventually(lambda: first not in there.engine.containers, "the end of the old one")


async def test_gpu_function_is_refused_when_its_image_has_no_shim(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        there.engine.images["plain:1"] = {"Id": "sha256:2", "Config": {"Labels": None}}
        await there.provider.close()
        await there.another(Told("tcp:one:1")).start(there.heard)
        with pytest.raises(BadDeployment, match="it has no shim"):
            await there.deploy("plain:1", labels={"com.gpufaas.enabled": "true"})
        await there.deploy("plain:1")
        await there.ready()


async def test_function_moves_when_another_network_is_chosen(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        await there.deploy()
        (first,) = await there.ready()
        await there.provider.close()
        await there.another(docker_network="elsewhere").start(there.heard)
        (second,) = await there.ready()
        assert first != second
        await eventually(lambda: list(there.engine.containers) == [second])
        assert there.engine.bodies[second]["HostConfig"]["NetworkMode"] == "elsewhere"


async def test_unknown_containers_are_removed_each_by_itself(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        labels = {"com.gpufaas.function": "old.openfaas-fn"}
        for name in ("stuck", "stray"):
            there.engine.containers[name] = {"Config": {"Labels": labels}, "State": {}}
        there.engine.failing["DELETE containers/stuck"] = (500, "device or resource busy")
        there.engine.break_off()
        await eventually(lambda: "stray" not in there.engine.containers)
        await there.deploy()  # and that one is stuck changes nothing for others
        await there.ready()


async def test_output_is_kept_by_its_own_time(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        content = b"2026-01-02T03:04:05.5Z hello\n"
        there.engine.output = b"\1\0\0\0" + len(content).to_bytes(4, "big") + content
        await there.deploy()
        (instance,) = await there.ready()
        await eventually(there.log_texts, "a line")
        lines = [line async for line in there.provider.logs(LogQuery(F))]
        assert [(one.instance, one.text, one.at.second) for one in lines] == [
            (instance, "hello", 5)
        ]
        await there.output_read(2)  # the second request follows once the first was stored
        assert len(await there.log_texts()) == 1


async def test_no_line_is_lost_when_many_are_written_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        line = b"2026-01-02T03:04:05.5Z " + b"x" * 50 + b"\n"
        there.engine.output = (b"\1\0\0\0" + len(line).to_bytes(4, "big") + line) * 3000
        await there.deploy()
        await there.ready()
        await there.output_read(2)  # the second request follows once the first was stored
        assert len(await there.log_texts()) == 3000


async def test_engine_is_refused_when_it_is_too_old(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        there.engine.version = "1.40"
        await there.provider.close()
        await there.another().start(there.heard)
        with pytest.raises(ProviderFailed, match=r"1\.41 \(Docker 20\.10\) is the least"):
            await there.deploy()


async def test_newer_engine_is_asked_in_a_version_that_we_know(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        there.engine.version = "1.99"
        await there.provider.close()
        await there.another().start(there.heard)
        await there.deploy()
        await there.ready()


async def test_deployment_is_refused_when_something_it_names_is_not_there(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        with pytest.raises(BadDeployment, match="there is no secret key"):
            await there.deploy(secrets=("key",))
        with pytest.raises(UnknownFunction):
            await there.deploy(update=True)
        with pytest.raises(UnknownNamespace):
            await there.provider.functions("dev")
        await there.provider.create_namespace(Namespace("dev"))
        assert await there.provider.functions("dev") == []
        await there.provider.remove_namespace("dev")


async def test_state_folder_is_one_gateways(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        before = there.provider
        with pytest.raises(ProviderFailed, match="another gateway has its state"):
            await there.another().start(there.heard)
        there.provider = before


async def test_endless_output_is_kept_within_its_budget_and_the_log_says_so(tmp_path: Path) -> None:
    async with world(tmp_path) as there:
        line = b"2026-01-02T03:04:05.1Z y\n"
        there.engine.output = (b"\1\0\0\0" + len(line).to_bytes(4, "big") + line) * 30_000
        await there.deploy()
        await there.ready()

        async def is_told() -> bool:
            return any("were dropped" in text for text in await there.log_texts())

        await eventually(is_told, "the notice")
        assert 5_000 <= (await there.log_texts()).count("y") < 30_000
