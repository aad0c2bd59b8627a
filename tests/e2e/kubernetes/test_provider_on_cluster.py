"""The Kubernetes provider on a real API server: life, updates, restarts, two gateways, secrets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from gateway_ext.errors import BadDeployment, SecretInUse, UnknownNamespace
from gateway_ext.model import Deployment, FunctionId, Namespace, Resources
from gateway_ext.ports import LogQuery
from gateway_ext.providers.kubernetes.provider import KubernetesProvider
from gateway_ext.settings import GatewaySettings
from tests.e2e.kubernetes.web_image import WEB, web_image
from tests.kit.engines.kubernetes.kubernetes_node import KubernetesNode
from tests.kit.engines.kubernetes.node_programs import etcd_program
from tests.kit.processes.process_functions import Heard
from tests.kit.waiting import eventually

pytestmark = pytest.mark.usefixtures("inside")

SECOND = "gpufaas-test/web:2"
# As the first process of its container the web server is not ended by SIGTERM.
SHORT = {"com.gpufaas.timeout": "1s"}
_ACCOUNT = "tested-gateway"


@pytest.fixture(scope="module")
def credentials(node: KubernetesNode, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a pod of the gateway has: a token and the authority's certificate."""
    folder = tmp_path_factory.mktemp("credentials")
    web_image(node, folder, WEB, SECOND)
    node.kubectl("create", "serviceaccount", _ACCOUNT)
    bound = ("--clusterrole=cluster-admin", f"--serviceaccount=default:{_ACCOUNT}")
    node.kubectl("create", "clusterrolebinding", _ACCOUNT, *bound)
    (folder / "token").write_text(node.kubectl("create", "token", _ACCOUNT))
    (folder / "ca.crt").write_bytes((node.files.pki / "ca.crt").read_bytes())
    return folder


@pytest.fixture
def namespace(node: KubernetesNode) -> Iterator[str]:
    """One of the test's own."""
    name = f"functions-{token_hex(4)}"
    node.kubectl("create", "namespace", name)
    yield name
    node.kubectl("delete", "namespace", name, "--wait=false")


@asynccontextmanager
async def provider(
    node: KubernetesNode, credentials: Path, *namespaces: str
) -> AsyncIterator[tuple[KubernetesProvider, Heard]]:
    settings = GatewaySettings(
        kubernetes_url=node.files.url,
        kubernetes_credentials_dir=str(credentials),
        kubernetes_namespaces=namespaces,
    )
    found, heard = KubernetesProvider(settings), Heard()
    await found.start(heard)
    try:
        yield found, heard
    finally:
        await found.close()


def function(id_: FunctionId, image: str = WEB, **more: Any) -> Deployment:
    return Deployment(id_, image, **{"annotations": SHORT, **more})


async def ready(heard: Heard, function: FunctionId, count: int) -> list[str]:
    await eventually(lambda: len(heard.endpoints.get(function, ())) == count, f"{count} are ready")
    return [one.address for one in heard.endpoints[function]]


async def agreed(counts: dict[FunctionId, int], *all_heard: Heard) -> None:
    """Wait until all have heard of the same endpoints, of each function as many as it wants.

    There are more for a moment: of two deployments at once, one replaces the other's pods.
    """

    def agree() -> bool:
        known = [
            {id_: sorted(one.address for one in heard.endpoints.get(id_, ())) for id_ in counts}
            for heard in all_heard
        ]
        return all(
            one == known[0] and {id_: len(found) for id_, found in one.items()} == counts
            for one in known
        )

    await eventually(agree, "all have heard the same")


def only_pod(node: KubernetesNode, namespace: str) -> str:
    (pod,) = node.items(f"/api/v1/namespaces/{namespace}/pods")
    return str(pod["metadata"]["name"])


def inside_of(pod: str, namespace: str) -> tuple[str, ...]:
    """The words by which kubectl runs busybox in it."""
    return ("exec", f"--namespace={namespace}", pod, "--", "/busybox")


async def status_of(address: str) -> bytes:
    """The first line of an instance's answer."""
    host, port = address.removeprefix("tcp:").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"GET /nothing HTTP/1.0\r\n\r\n")
        return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_function_lives_from_deployment_to_removal(
    node: KubernetesNode, credentials: Path, namespace: str
) -> None:
    f = FunctionId(namespace, "f")
    async with provider(node, credentials, namespace) as (there, heard):
        wanted = function(
            f,
            environment={"A": "b=c"},
            labels={"team": "blue"},
            annotations={**SHORT, "topic": "any text, with spaces"},
            limits=Resources(memory="64Mi", cpu="500m"),
            requests=Resources(memory="16m"),
            read_only=True,
        )
        await there.deploy(wanted, update=False)
        (address,) = await ready(heard, f, 1)
        assert b" 404 " in await status_of(address)
        await there.scale(f, 3)
        await ready(heard, f, 3)
        status = await there.function(f, usage=False)
        assert (status.deployment, status.replicas, status.available_replicas) == (wanted, 3, 3)
        assert len(node.items(f"/api/v1/namespaces/{namespace}/pods", team="blue")) == 3
        await there.scale(f, 0)
        await ready(heard, f, 0)
        await there.scale(f, 1)
        await ready(heard, f, 1)
        await there.remove(f)
        assert heard.gone == [f]
        assert list(await there.functions(namespace)) == []
        path = f"/api/v1/namespaces/{namespace}/pods"
        await eventually(lambda: not node.items(path), "its pods have ended")


async def test_update_always_has_an_instance(
    node: KubernetesNode, credentials: Path, namespace: str
) -> None:
    f = FunctionId(namespace, "f")
    async with provider(node, credentials, namespace) as (there, heard):
        await there.deploy(function(f), update=False)
        (before,) = await ready(heard, f, 1)
        await there.deploy(function(f, SECOND), update=True)
        await eventually(
            lambda: [one.address for one in heard.endpoints[f]] not in ([before], []),
            "the second one is ready",
        )
        await ready(heard, f, 1)
        assert heard.endpoints[f][0].address != before
        assert heard.least[f] == 1


async def test_image_that_is_not_there_is_told_and_the_one_before_it_serves(
    node: KubernetesNode, credentials: Path, namespace: str
) -> None:
    f = FunctionId(namespace, "f")
    async with provider(node, credentials, namespace) as (there, heard):
        await there.deploy(function(f), update=False)
        await ready(heard, f, 1)
        await there.deploy(function(f, "127.0.0.1:9/not:there"), update=True)

        async def is_told() -> bool:
            return "Image" in (await there.function(f, usage=False)).trouble

        await eventually(is_told, "the trouble is told")
        assert b" 404 " in await status_of((await ready(heard, f, 1))[0])
        with pytest.raises(BadDeployment):
            await there.deploy(function(f, labels={"a": "not a label"}), update=True)


async def test_two_gateways_and_the_one_after_them_know_the_same(
    node: KubernetesNode, credentials: Path, namespace: str
) -> None:
    names = [FunctionId(namespace, f"f{number}") for number in range(3)]
    async with (
        provider(node, credentials, namespace) as (one, heard_by_one),
        provider(node, credentials, namespace) as (other, heard_by_other),
    ):
        await asyncio.gather(
            *(each.deploy(function(names[0]), update=False) for each in (one, other)),
            one.deploy(function(names[1]), update=False),
            other.deploy(function(names[2], SECOND), update=False),
        )
        await asyncio.gather(*(each.scale(names[0], 2) for each in (one, other)))
        await agreed(dict(zip(names, (2, 1, 1), strict=True)), heard_by_one, heard_by_other)
    async with provider(node, credentials, namespace) as (_, heard):
        assert sorted(heard.deployments) == names
        await agreed(dict(zip(names, (2, 1, 1), strict=True)), heard)


async def test_changes_are_heard_when_the_api_server_was_away_and_has_forgotten(
    node: KubernetesNode, credentials: Path, namespace: str
) -> None:
    f = FunctionId(namespace, "f")
    async with provider(node, credentials, namespace) as (there, heard):
        await there.deploy(function(f), update=False)
        (before,) = await ready(heard, f, 1)
        node.kill("apiserver")
        assert b" 404 " in await status_of(before)
        _forget_history(node)
        node.restart("apiserver")
        node.kubectl("delete", "pods", "--all", f"--namespace={namespace}", "--grace-period=1")
        await eventually(
            lambda: before not in [one.address for one in heard.endpoints[f]], "it has ended"
        )
        await ready(heard, f, 1)


def _forget_history(node: KubernetesNode) -> None:
    """Have etcd keep no changes of before now, as it does every five minutes."""
    etcdctl = str(etcd_program().with_name("etcdctl"))
    at = json.loads(node.run(etcdctl, "get", "x", "--write-out=json"))["header"]["revision"]
    node.run(etcdctl, "compact", str(at))


async def test_secret_is_mounted_and_kept_while_it_is_in_use(
    node: KubernetesNode, credentials: Path, namespace: str
) -> None:
    f = FunctionId(namespace, "f")
    async with provider(node, credentials, namespace) as (there, heard):
        await there.create_secret(namespace, "key.txt", b"\0one")
        await there.deploy(function(f, secrets=("key.txt",)), update=False)
        await ready(heard, f, 1)
        assert (
            node.kubectl(
                *inside_of(only_pod(node, namespace), namespace),
                "cat",
                "/var/openfaas/secrets/key.txt",
            )
            == "\0one"
        )
        with pytest.raises(SecretInUse):
            await there.remove_secret(namespace, "key.txt")
        await there.remove(f)
        await there.remove_secret(namespace, "key.txt")
        assert list(await there.secrets(namespace)) == []


async def test_logs_of_pods_are_followed(
    node: KubernetesNode, credentials: Path, namespace: str
) -> None:
    f = FunctionId(namespace, "f")
    async with provider(node, credentials, namespace) as (there, heard):
        await there.deploy(function(f), update=False)
        await ready(heard, f, 1)
        pod = only_pod(node, namespace)
        lines = there.logs(LogQuery(f, follow=True))
        coming = asyncio.ensure_future(anext(lines))
        writes = (*inside_of(pod, namespace), "sh", "-c", "echo from within >/proc/1/fd/1")
        await asyncio.to_thread(node.kubectl, *writes)
        line = await asyncio.wait_for(coming, 60)
        assert (line.function, line.instance, line.text) == (f, pod, "from within")
        await there.remove(f)
        assert [each async for each in lines] == []


async def test_namespaces_come_and_go_with_what_is_in_them(
    node: KubernetesNode, credentials: Path
) -> None:
    team = f"team-{token_hex(4)}"
    f = FunctionId(team, "f")
    async with provider(node, credentials) as (there, heard):
        await there.create_namespace(Namespace(team, {"a": "b"}))
        assert Namespace(team, {"a": "b"}) in await there.namespaces()
        await there.deploy(function(f), update=False)
        await ready(heard, f, 1)
        await there.remove_namespace(team)
        await eventually(lambda: f in heard.gone, "its function is gone")
        with contextlib.suppress(UnknownNamespace):
            await there.functions(team)
        with pytest.raises(UnknownNamespace):
            await there.functions("kube-system")
