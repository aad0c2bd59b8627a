"""Runs functions as Deployments of a Kubernetes cluster, whose API server keeps them."""

import asyncio
import contextlib
import logging
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from common.tasks import BackgroundTasks
from gateway_ext.errors import (
    BadDeployment,
    BadRequest,
    GatewayError,
    NamespaceExists,
    ProviderFailed,
    SecretExists,
    SecretInUse,
    UnknownFunction,
    UnknownNamespace,
    UnknownSecret,
    Unsupported,
)
from gateway_ext.model import (
    DEFAULT_NAMESPACE,
    Deployment,
    FunctionId,
    FunctionStatus,
    LogLine,
    Namespace,
)
from gateway_ext.openfaas import function_options
from gateway_ext.ports import FunctionListener, Injection, LogQuery
from gateway_ext.providers.function_environment import gpu_environment, injected_digest
from gateway_ext.providers.http_api import PassingOver, ServerRefused
from gateway_ext.providers.kubernetes import manifest
from gateway_ext.providers.kubernetes.client import MERGE, ClusterClient, Json, ObjectWatch
from gateway_ext.providers.kubernetes.manifest import (
    FUNCTION,
    GATEWAY,
    ReleaseMarks,
    StoredFunction,
)
from gateway_ext.providers.kubernetes.watched_functions import (
    PodLogs,
    PodState,
    WatchedFunctions,
    pod_state,
)
from gateway_ext.settings import GatewaySettings

log = logging.getLogger(__name__)

_APPS, _CORE = "/apis/apps/v1", "/api/v1"
_ABSENT = 404
_CHANGED = frozenset({404, 409})  # the answers if what was read has changed meanwhile
_REFUSED_BODY = frozenset({400, 422})
_SEEN_S = 5.0  # how long a change waits for this gateway's own watch to show it
_DELETION = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
_ATTEMPTS = 10  # at a change that others make at the same time


_LABEL_VALUE = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?")
_PULLS = frozenset({"Always", "IfNotPresent", "Never"})


def check_settings(settings: GatewaySettings) -> None:
    """BadRequest names the value that is not allowed."""
    url, name, pull = settings.kubernetes_url, settings.kubernetes_name, settings.kubernetes_pull
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise BadRequest(f"kubernetes_url: {url!r}: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path.strip("/"):
        raise BadRequest(f"kubernetes_url: {url!r}: https://HOST:PORT is expected")
    if not _LABEL_VALUE.fullmatch(name):
        raise BadRequest(f"kubernetes_name: {name!r} is no value of a label")
    if pull not in _PULLS:
        expected = ", ".join(sorted(_PULLS))
        raise BadRequest(f"kubernetes_pull: {pull!r}: {expected} is expected")
    manifest.further_gpu_fields(settings)


class KubernetesProvider:
    """Implements `gateway_ext.ports.Provider`; several gateways may share the functions."""

    name = "kubernetes"

    def __init__(self, settings: GatewaySettings, injection: Injection | None = None) -> None:
        check_settings(settings)
        self._settings = settings
        self._injection = injection
        self._client = ClusterClient(
            settings.kubernetes_url, Path(settings.kubernetes_credentials_dir)
        )
        self._namespaces = ClusterNamespaces(self._client, settings)
        self._secrets = ClusterSecrets(self._client, settings.kubernetes_name)
        self._view = WatchedFunctions()
        self._logs = PodLogs(self._client, self._view)
        # Changes of a function reach the cluster in the order in which they were given here.
        self._locks: WeakValueDictionary[FunctionId, asyncio.Lock] = WeakValueDictionary()
        self._watching = BackgroundTasks(log, "watching the cluster")

    async def start(self, listener: FunctionListener) -> None:
        """Read what the cluster has; ProviderFailed if its API server cannot be asked."""
        self._client.open()
        try:
            watches = self._watches()
            for watch in watches:
                await watch.list()
            self._view.report_to(listener)
            await self._renew_injected()
        except BaseException:
            await self._client.close()
            raise
        for watch in watches:
            self._watching.start(watch.follow())

    async def close(self) -> None:
        """Stop watching; functions continue to run."""
        await self._watching.close()
        await self._client.close()

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        """Accept a deployment; the pods of the one before it serve until new ones are ready."""
        options = function_options.of(deployment)
        manifest.check(deployment)
        await self._check_secrets(deployment)
        async with self._locks.setdefault(deployment.id, asyncio.Lock()):
            before = self._view.found(deployment.id)
            await _until_made(
                deployment.id,
                lambda: self._write(deployment, options.scale_min, token_hex(6), update=update),
            )
            await self._seen(
                deployment.id,
                lambda stored: stored and (before is None or stored.marks != before.marks),
            )

    async def remove(self, function: FunctionId) -> None:
        """Remove a function; its pods take no call any more, and end after those they have."""
        async with self._locks.setdefault(function, asyncio.Lock()):
            await self._owned(function)
            path, missing = _path(function), UnknownFunction(function)
            await self._client.call("DELETE", path, body=_DELETION, missing=missing)
            await self._seen(function, lambda stored: stored is None)

    async def scale(self, function: FunctionId, replicas: int) -> None:
        async with self._locks.setdefault(function, asyncio.Lock()):
            await self._owned(function)
            path, missing = _path(function), UnknownFunction(function)
            body = {"spec": {"replicas": replicas}}
            await self._client.call("PATCH", path, body=body, kind=MERGE, missing=missing)
            await self._seen(function, lambda stored: stored is None or stored.wanted == replicas)

    async def functions(self, namespace: str) -> Sequence[FunctionStatus]:
        await self._namespaces.check(namespace)
        return [self._view.status(function) for function in self._view.ids(namespace)]

    async def function(self, function: FunctionId, *, usage: bool) -> FunctionStatus:
        """One function, without its usage, which a cluster's API server does not know."""
        del usage
        return self._view.status(function)

    async def logs(self, query: LogQuery) -> AsyncGenerator[LogLine, None]:
        """Lines of the pods that there are, oldest first."""
        self._view.status(query.function)
        async with contextlib.aclosing(self._logs.read(query)) as lines:
            async for line in lines:
                yield line

    def template_bytes(self) -> Mapping[FunctionId, int]:
        """Nothing: pods are forks of no template."""
        return {}

    async def secrets(self, namespace: str) -> Sequence[str]:
        await self._namespaces.check(namespace)
        return await self._secrets.names(namespace)

    async def create_secret(self, namespace: str, name: str, value: bytes) -> None:
        await self._namespaces.check(namespace)
        await self._secrets.create(namespace, name, value)

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        """Running pods see the new value within a minute or two."""
        await self._namespaces.check(namespace)
        await self._secrets.update(namespace, name, value)

    async def remove_secret(self, namespace: str, name: str) -> None:
        await self._namespaces.check(namespace)
        for stored in self._view.all():
            deployment = stored.deployment
            if deployment.id.namespace == namespace and name in deployment.secrets:
                raise SecretInUse(name, deployment.id)
        await self._secrets.remove(namespace, name)

    async def namespaces(self) -> Sequence[Namespace]:
        return await self._namespaces.all()

    async def create_namespace(self, namespace: Namespace) -> None:
        """Unsupported if the settings name all namespaces."""
        await self._namespaces.create(namespace)

    async def update_namespace(self, namespace: Namespace) -> None:
        """Unsupported if the settings name all namespaces."""
        await self._namespaces.update(namespace)

    async def remove_namespace(self, name: str) -> None:
        await self._namespaces.remove(name)
        await self._view.until(lambda: not self._view.ids(name), _SEEN_S)

    # -- the cluster ----------------------------------------------------------------------------

    def _watches(self) -> list[ObjectWatch[StoredFunction] | ObjectWatch[PodState]]:
        """Functions before pods: what is unknown has no pods."""
        chosen = f"{GATEWAY}={self._settings.kubernetes_name},{FUNCTION}"
        paths = self._namespaces.paths
        view, client = self._view, self._client
        return [
            *(
                ObjectWatch(client, path, chosen, _stored, view.function_changed)
                for path in paths(_APPS, "deployments")
            ),
            *(
                ObjectWatch(client, path, chosen, pod_state, view.pod_changed)
                for path in paths(_CORE, "pods")
            ),
        ]

    async def _write(
        self, deployment: Deployment, least: int, release: str, *, update: bool
    ) -> bool:
        """False if somebody else changed the Deployment meanwhile."""
        id_ = deployment.id
        raw = await self._raw(id_)
        if raw is None and update:
            raise UnknownFunction(id_)
        stored = None if raw is None else self._ours(raw)
        if raw is not None and stored is None:
            raise BadDeployment(f"{id_.namespace} has a Deployment {id_.name} that is not ours")
        life = stored.marks.life if stored else token_hex(4)
        wanted = max(stored.wanted, least) if stored else least
        return await self._replace(raw, deployment, ReleaseMarks(life, release), wanted)

    async def _replace(
        self, raw: Json | None, deployment: Deployment, marks: ReleaseMarks, wanted: int
    ) -> bool:
        """False if what was found has changed meanwhile."""
        id_ = deployment.id
        injected = gpu_environment(self._injection, deployment)
        body = manifest.manifest(deployment, self._settings, injected, marks, wanted)
        try:
            if raw is None:
                missing = UnknownNamespace(id_.namespace)
                await self._client.call("POST", _all(id_.namespace), body=body, missing=missing)
            else:
                body["metadata"]["resourceVersion"] = raw["metadata"]["resourceVersion"]
                await self._client.call("PUT", _path(id_), body=body)
        except ServerRefused as refused:
            if refused.status in _CHANGED:
                return False
            if refused.status in _REFUSED_BODY:
                raise BadDeployment(refused.message) from refused
            raise
        return True

    async def _raw(self, function: FunctionId) -> Json | None:
        with PassingOver(_ABSENT):
            return await self._client.get(_path(function))
        return None

    async def _owned(self, function: FunctionId) -> None:
        """UnknownFunction if there is none of that name; what is not ours is not touched."""
        raw = await self._raw(function)
        if raw is None or self._ours(raw) is None:
            raise UnknownFunction(function)

    def _ours(self, raw: Json) -> StoredFunction | None:
        """The function in a Deployment; None if it is none of this gateway's."""
        labels = raw["metadata"].get("labels") or {}
        return _stored(raw) if labels.get(GATEWAY) == self._settings.kubernetes_name else None

    async def _check_secrets(self, deployment: Deployment) -> None:
        namespace = deployment.id.namespace
        await self._namespaces.check(namespace)
        if not deployment.secrets:
            return
        names = await self._secrets.names(namespace)
        missing = [name for name in deployment.secrets if name not in names]
        if missing:
            raise BadDeployment(f"there is no secret {', '.join(missing)} in {namespace}")

    async def _seen(
        self, function: FunctionId, holds: Callable[[StoredFunction | None], object]
    ) -> None:
        """Have the watch show a change: what follows at this gateway relies on it."""
        if not await self._view.until(lambda: bool(holds(self._view.found(function))), _SEEN_S):
            log.warning("%s: the cluster's watch is behind its changes", function)

    async def _renew_injected(self) -> None:
        """Deploy GPU functions again whose injected addresses or credentials have changed."""
        for stored in self._view.all():
            function = stored.deployment.id
            try:
                if not self._is_injected(stored):
                    await _until_made(function, lambda: self._renew(function))  # noqa: B023
            except GatewayError as error:
                log.warning("%s keeps its injected variables: %s", function, error)

    async def _renew(self, function: FunctionId) -> bool:
        """Deploy a function again as it is by now; False if it has changed meanwhile."""
        raw = await self._raw(function)
        stored = None if raw is None else self._ours(raw)
        if stored is None or self._is_injected(stored):
            return True  # another gateway was faster
        log.info("%s is deployed again: its injected variables changed", function)
        marks = ReleaseMarks(stored.marks.life, token_hex(6))
        return await self._replace(raw, stored.deployment, marks, stored.wanted)

    def _is_injected(self, stored: StoredFunction) -> bool:
        injected = gpu_environment(self._injection, stored.deployment)
        return injected_digest(injected) == stored.injected


def _stored(raw: Json) -> StoredFunction | None:
    stored = manifest.stored_function(raw)
    if stored is None:
        metadata = raw["metadata"]
        log.warning("%s in %s is no function", metadata.get("name"), metadata.get("namespace"))
    return stored


def _all(namespace: str) -> str:
    return f"{_APPS}/namespaces/{namespace}/deployments"


def _path(function: FunctionId) -> str:
    return f"{_all(function.namespace)}/{function.name}"


async def _until_made(function: FunctionId, attempt: Callable[[], Awaitable[bool]]) -> None:
    """Attempt a change until nobody else changes the function at the same time."""
    for _ in range(_ATTEMPTS):
        if await attempt():
            return
    raise ProviderFailed(f"{function}: others change it again and again")


class ClusterSecrets:
    """Secrets that carry this gateway's label; others of the cluster are neither shown nor used."""

    def __init__(self, client: ClusterClient, name: str) -> None:
        self._client = client
        self._name = name

    async def names(self, namespace: str) -> Sequence[str]:
        chosen = {"labelSelector": f"{GATEWAY}={self._name}"}
        answer = await self._client.get(_secret_path(namespace), chosen)
        return sorted(str(secret["metadata"]["name"]) for secret in answer.get("items") or [])

    async def create(self, namespace: str, name: str, value: bytes) -> None:
        """SecretExists if there is one of that name, this gateway's or another one."""
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {"name": name, "labels": {GATEWAY: self._name}},
            "data": {name: b64encode(value).decode()},
        }
        await self._client.call(
            *("POST", _secret_path(namespace), None, body),
            missing=UnknownNamespace(namespace),
            exists=SecretExists(namespace, name),
            invalid=BadRequest,
        )

    async def update(self, namespace: str, name: str, value: bytes) -> None:
        await self._check(namespace, name)
        body = {"data": {name: b64encode(value).decode()}}
        await self._client.call("PATCH", _secret_path(namespace, name), body=body, kind=MERGE)

    async def remove(self, namespace: str, name: str) -> None:
        await self._check(namespace, name)
        await self._client.call("DELETE", _secret_path(namespace, name))

    async def _check(self, namespace: str, name: str) -> None:
        if name not in await self.names(namespace):
            raise UnknownSecret(namespace, name)


def _secret_path(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/secrets" + (f"/{name}" if name else "")


_NAMESPACE_LABEL = "com.gpufaas.functions"
_PATH = "/api/v1/namespaces"


class ClusterNamespaces:
    """With names in the settings no right over the cluster's namespaces is needed, nor used."""

    def __init__(self, client: ClusterClient, settings: GatewaySettings) -> None:
        self._client = client
        self._fixed = settings.kubernetes_namespaces
        self._name = settings.kubernetes_name

    def paths(self, group: str, kind: str) -> Sequence[str]:
        """Where all objects of a kind that may be a function's are listed."""
        if not self._fixed:
            return [f"{group}/{kind}"]
        return [f"{group}/namespaces/{name}/{kind}" for name in self._fixed]

    async def all(self) -> Sequence[Namespace]:
        """All namespaces with functions, by name."""
        if self._fixed:
            return [Namespace(name) for name in sorted(self._fixed)]
        chosen = {"labelSelector": f"{_NAMESPACE_LABEL}={self._name}"}
        namespaces = {DEFAULT_NAMESPACE: Namespace(DEFAULT_NAMESPACE)}
        for raw in (await self._client.get(_PATH, chosen)).get("items") or []:
            namespace = _read(raw)
            namespaces[namespace.name] = namespace
        return [namespaces[name] for name in sorted(namespaces)]

    async def check(self, name: str) -> None:
        if name not in {namespace.name for namespace in await self.all()}:
            raise UnknownNamespace(name)

    async def create(self, namespace: Namespace) -> None:
        """NamespaceExists if there is one of that name, with functions or without."""
        self._check_managed()
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": self._metadata(namespace)}
        exists = NamespaceExists(namespace.name)
        await self._client.call("POST", _PATH, body=body, exists=exists, invalid=BadRequest)

    async def update(self, namespace: Namespace) -> None:
        """Replace what the namespace was given; labels that the cluster added stay."""
        self._check_managed()
        before = await self._labelled(namespace.name)
        wanted = self._metadata(namespace)
        # A merge patch from what it was given before to what it is given now.
        changes = {
            "labels": {**dict.fromkeys(before.labels), **wanted["labels"]},
            "annotations": {**dict.fromkeys(before.annotations), **wanted["annotations"]},
        }
        path, body = f"{_PATH}/{namespace.name}", {"metadata": changes}
        await self._client.call("PATCH", path, body=body, kind=MERGE, invalid=BadRequest)

    async def remove(self, name: str) -> None:
        self._check_managed()
        await self._labelled(name)
        await self._client.call("DELETE", f"{_PATH}/{name}")

    def _check_managed(self) -> None:
        if self._fixed:
            raise Unsupported("kubernetes_namespaces names the namespaces of this gateway")

    async def _labelled(self, name: str) -> Namespace:
        """One of ours as it is now; UnknownNamespace of another one."""
        raw = await self._client.call("GET", f"{_PATH}/{name}", missing=UnknownNamespace(name))
        if (raw["metadata"].get("labels") or {}).get(_NAMESPACE_LABEL) != self._name:
            raise UnknownNamespace(name)
        return _read(raw)

    def _metadata(self, namespace: Namespace) -> Json:
        return {
            "name": namespace.name,
            "labels": {**namespace.labels, _NAMESPACE_LABEL: self._name},
            "annotations": dict(namespace.annotations),
        }


def _read(raw: Json) -> Namespace:
    metadata = raw["metadata"]
    labels = dict(metadata.get("labels") or {})
    for name in (_NAMESPACE_LABEL, "kubernetes.io/metadata.name"):
        labels.pop(name, None)
    return Namespace(metadata["name"], labels, dict(metadata.get("annotations") or {}))
