"""The provider on an API server in memory: what it writes there, and what it hears of changes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from common.gpu_wishes import GpuWishes
from gateway_ext.errors import (
    BadDeployment,
    BadRequest,
    NamespaceExists,
    ProviderFailed,
    SecretExists,
    SecretInUse,
    UnknownFunction,
    UnknownNamespace,
    UnknownSecret,
    Unsupported,
)
from gateway_ext.model import Deployment, FunctionId, Namespace
from gateway_ext.ports import LogQuery
from gateway_ext.providers.kubernetes.provider import KubernetesProvider
from gateway_ext.settings import GatewaySettings
from tests.kit.fakes.fake_cluster import FakeCluster
from tests.kit.processes.process_functions import Heard
from tests.kit.waiting import eventually

F = FunctionId("openfaas-fn", "f")
WANTED = Deployment(F, "image:1")


class Injected:
    """Variables of GPU functions; another node is another address."""

    def __init__(self, node: str) -> None:
        self.node = node

    def environment(self, function: FunctionId, _wishes: GpuWishes) -> Mapping[str, str]:
        return {"GPUFAAS_ADDRESS": self.node, "GPUFAAS_CREDENTIAL": f"of {function}"}


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    found = FakeCluster()
    await found.start()
    yield found
    await found.close()


@asynccontextmanager
async def provider(
    cluster: FakeCluster, injection: Injected | None = None, **settings: Any
) -> AsyncIterator[tuple[KubernetesProvider, Heard]]:
    heard = Heard()
    found = KubernetesProvider(GatewaySettings(kubernetes_url=cluster.url, **settings), injection)
    await found.start(heard)
    try:
        yield found, heard
    finally:
        await found.close()


def addresses(heard: Heard, function: FunctionId = F) -> list[str]:
    return [one.address for one in heard.endpoints.get(function, ())]


async def test_function_is_known_when_its_deployment_is_accepted(cluster: FakeCluster) -> None:
    async with provider(cluster) as (there, heard):
        await there.deploy(WANTED, update=False)

        assert heard.deployments == {F: WANTED}
        assert addresses(heard) == []
        status = await there.function(F, usage=True)
        assert (status.replicas, status.available_replicas) == (1, 0)
        assert [one.deployment for one in await there.functions("openfaas-fn")] == [WANTED]


async def test_pod_is_called_while_it_is_ready_and_stays(cluster: FakeCluster) -> None:
    async with provider(cluster) as (there, heard):
        await there.deploy(WANTED, update=False)
        await cluster.pod("f", "f-1", "10.0.0.1")
        await cluster.pod("f", "f-2", "fd00::2")
        await cluster.pod("f", "f-3")
        await eventually(lambda: addresses(heard) == ["tcp:10.0.0.1:8080", "tcp:[fd00::2]:8080"])
        assert (await there.function(F, usage=False)).available_replicas == 2
        leaving = cluster.get("pods", "f-1")
        assert leaving is not None
        leaving["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:06Z"
        await cluster.put("pods", leaving)
        await eventually(lambda: addresses(heard) == ["tcp:[fd00::2]:8080"])
        await cluster.delete("pods", "f-2")
        await eventually(lambda: addresses(heard) == [])


async def test_update_keeps_replicas_and_whoever_changes_them_meanwhile(
    cluster: FakeCluster,
) -> None:
    async with provider(cluster) as (there, _), provider(cluster) as (other, _):
        await there.deploy(WANTED, update=False)
        await there.scale(F, 3)
        changes: list[asyncio.Task[None]] = []

        def scaled_meanwhile() -> None:
            cluster.before_put = None
            found = cluster.get("deployments", "f")
            assert found is not None
            found["spec"]["replicas"] = 4
            changes.append(asyncio.create_task(cluster.put("deployments", found)))
            found["metadata"]["resourceVersion"] = "another"

        cluster.before_put = scaled_meanwhile
        await there.deploy(Deployment(F, "image:2"), update=True)
        await asyncio.gather(*changes)

        async def is_seen() -> bool:
            status = await other.function(F, usage=False)
            return (status.deployment.image, status.replicas) == ("image:2", 4)

        await eventually(is_seen)


async def test_deployment_of_an_earlier_life_has_no_pods(cluster: FakeCluster) -> None:
    async with provider(cluster) as (there, heard):
        await there.deploy(WANTED, update=False)
        await cluster.pod("f", "old", "10.0.0.1")
        await eventually(lambda: addresses(heard) != [])
        await there.remove(F)
        assert heard.gone == [F]
        await there.deploy(WANTED, update=False)
        await cluster.pod("f", "new", "10.0.0.2")
        await eventually(lambda: addresses(heard) == ["tcp:10.0.0.2:8080"])


async def test_unknown_functions_are_not_changed(cluster: FakeCluster) -> None:
    theirs = {"metadata": {"name": "theirs", "labels": {"app": "x"}}, "spec": {"replicas": 1}}
    await cluster.put("deployments", theirs)
    id_ = FunctionId("openfaas-fn", "theirs")
    async with provider(cluster) as (there, heard):
        before = cluster.writes
        with pytest.raises(UnknownFunction):
            await there.deploy(WANTED, update=True)
        with pytest.raises(UnknownFunction):
            await there.remove(F)
        for refused in (there.remove(id_), there.scale(id_, 0), there.function(id_, usage=False)):
            with pytest.raises(UnknownFunction):
                await refused
        with pytest.raises(BadDeployment, match="not ours"):
            await there.deploy(Deployment(id_, "image"), update=False)
        with pytest.raises(UnknownNamespace):
            await there.functions("elsewhere")
        with pytest.raises(BadDeployment, match="lower case"):
            await there.deploy(Deployment(FunctionId("openfaas-fn", "F"), "i"), update=False)
        assert cluster.writes == before
        assert heard.deployments == {}


async def test_watch_goes_on_where_it_was_cut(cluster: FakeCluster) -> None:
    async with provider(cluster) as (there, heard):
        await there.deploy(WANTED, update=False)
        await cluster.pod("f", "f-1", "10.0.0.1")
        await eventually(lambda: addresses(heard) == ["tcp:10.0.0.1:8080"])
        cluster.cut()
        await cluster.pod("f", "f-2", "10.0.0.2")
        await eventually(lambda: len(addresses(heard)) == 2)


async def test_all_is_listed_again_when_the_watch_has_expired(cluster: FakeCluster) -> None:
    async with provider(cluster) as (there, heard):
        await there.deploy(WANTED, update=False)
        await cluster.pod("f", "f-1", "10.0.0.1")
        await eventually(lambda: addresses(heard) == ["tcp:10.0.0.1:8080"])
        cluster.cut()
        await cluster.delete("pods", "f-1")
        await cluster.pod("f", "f-2", "10.0.0.2")
        cluster.compact()
        await eventually(lambda: addresses(heard) == ["tcp:10.0.0.2:8080"])
        await cluster.delete("deployments", "f")
        await eventually(lambda: heard.gone == [F])


async def test_outage_is_told_once_and_its_end_when_it_is_over(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def told(words: str) -> int:
        return sum(words in record.getMessage() for record in caplog.records)

    async with provider(cluster) as (there, _):
        cluster.away = True
        cluster.cut()
        await eventually(lambda: cluster.asked_in_vain >= 6)
        assert (told("retrying"), told("answers again")) == (2, 0)
        cluster.away = False
        await there.deploy(WANTED, update=False)
        await cluster.pod("f", "f-1")
        await eventually(lambda: told("answers again") == 2)
        assert told("retrying") == 2


async def test_all_objects_are_listed_where_one_answer_has_a_part_of_them(
    cluster: FakeCluster,
) -> None:
    async with provider(cluster) as (there, _):
        await there.deploy(WANTED, update=False)
    for number in range(1001):
        await cluster.pod("f", f"f-{number}", f"10.0.{number >> 8}.{number & 255}")
    async with provider(cluster) as (_, heard):
        assert len(addresses(heard)) == 1001


async def test_restarted_gateway_reads_everything_and_changes_nothing(cluster: FakeCluster) -> None:
    wanted = Deployment(
        F, "image", environment={"a": "b"}, labels={"c": "d"}, annotations={"com.gpufaas.slo": "1s"}
    )
    async with provider(cluster) as (there, _):
        await there.deploy(wanted, update=False)
        await there.scale(F, 2)
        await cluster.pod("f", "f-1", "10.0.0.1")
    before = cluster.writes
    async with provider(cluster) as (there, heard):
        assert heard.deployments == {F: wanted}
        assert addresses(heard) == ["tcp:10.0.0.1:8080"]
        assert (await there.function(F, usage=False)).replicas == 2
        assert cluster.writes == before


async def test_function_is_deployed_again_when_its_gpu_manager_has_another_address(
    cluster: FakeCluster,
) -> None:
    on_gpu = Deployment(F, "image", annotations={"com.gpufaas.enabled": "true"})

    def environment() -> dict[str, str]:
        found = cluster.get("deployments", "f")
        assert found is not None
        (container,) = found["spec"]["template"]["spec"]["containers"]
        return {each["name"]: each["value"] for each in container["env"]}

    async with provider(cluster, Injected("tcp:a:1")) as (there, _):
        await there.deploy(on_gpu, update=False)
        assert environment()["GPUFAAS_ADDRESS"] == "tcp:a:1"
    writes = cluster.writes
    async with provider(cluster, Injected("tcp:a:1")):
        assert cluster.writes == writes
    async with provider(cluster, Injected("unix:/run/g/node.sock")):
        assert environment()["GPUFAAS_ADDRESS"] == "unix:/run/g/node.sock"

    def status_changed() -> None:
        cluster.before_put = None
        found = cluster.get("deployments", "f")
        assert found is not None
        found["metadata"]["resourceVersion"] = "another"

    cluster.before_put = status_changed
    async with provider(cluster, Injected("tcp:b:1")):
        assert environment()["GPUFAAS_ADDRESS"] == "tcp:b:1"


async def test_secrets_are_those_of_this_gateway(cluster: FakeCluster) -> None:
    await cluster.put("secrets", {"metadata": {"name": "theirs"}, "data": {}})
    async with provider(cluster) as (there, _):
        await there.create_secret("openfaas-fn", "key", b"\0one")
        assert await there.secrets("openfaas-fn") == ["key"]
        with pytest.raises(SecretExists):
            await there.create_secret("openfaas-fn", "theirs", b"")
        with pytest.raises(BadRequest, match="invalid"):
            await there.create_secret("openfaas-fn", "under_scored", b"")
        for refused in (
            there.update_secret("openfaas-fn", "theirs", b""),
            there.remove_secret("openfaas-fn", "theirs"),
        ):
            with pytest.raises(UnknownSecret):
                await refused
        with pytest.raises(BadDeployment, match="no secret theirs"):
            await there.deploy(Deployment(F, "image", secrets=("theirs",)), update=False)
        await there.deploy(Deployment(F, "image", secrets=("key",)), update=False)
        await there.update_secret("openfaas-fn", "key", b"two")
        stored = cluster.get("secrets", "key")
        assert stored is not None
        assert stored["data"] == {"key": "dHdv"}
        with pytest.raises(SecretInUse):
            await there.remove_secret("openfaas-fn", "key")
        await there.remove(F)
        await there.remove_secret("openfaas-fn", "key")
        assert await there.secrets("openfaas-fn") == []


async def test_namespaces_are_fixed_when_the_settings_name_them(cluster: FakeCluster) -> None:
    async with provider(cluster, kubernetes_namespaces=("b", "a")) as (there, _):
        assert [one.name for one in await there.namespaces()] == ["a", "b"]
        for refused in (
            there.create_namespace(Namespace("c")),
            there.update_namespace(Namespace("a")),
            there.remove_namespace("a"),
        ):
            with pytest.raises(Unsupported):
                await refused


async def test_namespaces_are_those_with_the_label_when_none_is_named(cluster: FakeCluster) -> None:
    await cluster.put("namespaces", {"metadata": {"name": "kube-system"}}, "")
    async with provider(cluster, kubernetes_namespaces=()) as (there, heard):
        team = Namespace("team", {"a": "b", "left": "out"}, {"c": "d"})
        await there.create_namespace(team)
        assert [one.name for one in await there.namespaces()] == ["openfaas-fn", "team"]
        with pytest.raises(NamespaceExists):
            await there.create_namespace(Namespace("kube-system"))
        for refused in (
            there.update_namespace(Namespace("kube-system")),
            there.remove_namespace("kube-system"),
        ):
            with pytest.raises(UnknownNamespace):
                await refused
        await there.update_namespace(Namespace("team", {"a": "c"}))
        assert await there.namespaces() == [Namespace("openfaas-fn"), Namespace("team", {"a": "c"})]
        await there.deploy(Deployment(FunctionId("team", "f"), "image"), update=False)
        assert list(heard.deployments) == [FunctionId("team", "f")]


async def test_logs_of_all_pods_are_in_their_order_and_go_on(cluster: FakeCluster) -> None:
    async with provider(cluster) as (there, heard):
        await there.deploy(WANTED, update=False)
        cluster.logs["f-1"] = "2026-01-01T00:00:01.5Z one\n2026-01-01T00:00:03Z three\n"
        cluster.logs["f-2"] = "2026-01-01T00:00:02.123456789Z two\nno line of a container\n"
        await cluster.pod("f", "f-1", "10.0.0.1")
        await cluster.pod("f", "f-2", "10.0.0.2")
        await eventually(lambda: len(addresses(heard)) == 2)

        async def texts(**query: Any) -> list[str]:
            wanted = LogQuery(F)._replace(**query)
            return [line.text async for line in there.logs(wanted)]

        assert await texts() == ["one", "two", "three"]
        assert await texts(tail=2) == ["two", "three"]
        assert await texts(tail=0) == []
        assert await texts(instance="f-2") == ["two"]
        since = datetime(2026, 1, 1, 0, 0, 2, tzinfo=UTC)
        assert await texts(since=since) == ["two", "three"]
        assert await texts(since=since + timedelta(seconds=5)) == []

        with pytest.raises(UnknownFunction):
            await texts(function=FunctionId("openfaas-fn", "unknown"))


@pytest.mark.parametrize(("tail", "before"), [(0, []), (1, ["three"])])
async def test_logs_that_are_followed_have_each_line_once(
    cluster: FakeCluster, tail: int, before: list[str]
) -> None:
    async with provider(cluster) as (there, heard):
        await there.deploy(WANTED, update=False)
        cluster.logs["f-1"] = "2026-01-01T00:00:03Z three\n"
        cluster.logs["f-2"] = "2026-01-01T00:00:02Z two\n"
        for number in (1, 2):
            await cluster.pod("f", f"f-{number}", f"10.0.0.{number}")
        await eventually(lambda: len(addresses(heard)) == 2)
        lines = there.logs(LogQuery(F, tail=tail, follow=True))
        coming = asyncio.ensure_future(anext(lines))
        at = "2026-01-01T00:00:04.5Z"
        cluster.logs["f-3"] = f"{at} of a pod\n{at} that comes later\n"
        await cluster.pod("f", "f-3", "10.0.0.3")
        found = [(await coming).text]
        while len(found) < len(before) + 2:
            found.append((await anext(lines)).text)
        assert found == [*before, "of a pod", "that comes later"]
        await there.remove(F)
        assert [line async for line in lines] == []


async def test_gateway_does_not_start_when_there_is_no_cluster() -> None:
    nobody = KubernetesProvider(GatewaySettings(kubernetes_url="http://127.0.0.1:9"))
    with pytest.raises(ProviderFailed, match="cannot be reached"):
        await nobody.start(Heard())


async def test_function_is_known_not_to_start_while_the_cluster_pauses_between_attempts(
    cluster: FakeCluster,
) -> None:
    async with provider(cluster) as (there, heard):
        await there.deploy(WANTED, update=False)
        waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
        await cluster.pod("f", "f-1", containerStatuses=[{"state": {"waiting": waiting}}])
        await eventually(lambda: heard.troubles[F].start, "it does not start")
        assert heard.troubles[F].start == "CrashLoopBackOff: back-off 10s"
        await cluster.pod("f", "f-2")  # of another version, which starts
        await eventually(lambda: not heard.troubles[F].start, "it may start")
