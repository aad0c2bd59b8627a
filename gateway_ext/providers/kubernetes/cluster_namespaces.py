"""Namespaces with functions: those that the settings name, or those of the cluster with a label."""

from collections.abc import Mapping, Sequence

from gateway_ext.errors import BadRequest, NamespaceExists, UnknownNamespace, Unsupported
from gateway_ext.model import DEFAULT_NAMESPACE, Namespace
from gateway_ext.providers.kubernetes.cluster_client import (
    MERGE,
    ClusterClient,
    ClusterRefused,
    Json,
)
from gateway_ext.providers.kubernetes.kubernetes_settings import KubernetesSettings

LABEL = "com.gpufaas.functions"
_PATH = "/api/v1/namespaces"
_ABSENT, _CONFLICT, _INVALID = 404, 409, 422


class ClusterNamespaces:
    """With names in the settings no right over the cluster's namespaces is needed, nor used."""

    def __init__(self, client: ClusterClient, settings: KubernetesSettings) -> None:
        self._client = client
        self._fixed = settings.namespaces
        self._name = settings.name

    def paths(self, group: str, kind: str) -> Sequence[str]:
        """Where all objects of a kind that may be a function's are listed."""
        if not self._fixed:
            return [f"{group}/{kind}"]
        return [f"{group}/namespaces/{name}/{kind}" for name in self._fixed]

    async def all(self) -> Sequence[Namespace]:
        """All namespaces with functions, by name."""
        if self._fixed:
            return [Namespace(name) for name in sorted(self._fixed)]
        chosen = {"labelSelector": f"{LABEL}={self._name}"}
        found = {DEFAULT_NAMESPACE: Namespace(DEFAULT_NAMESPACE)}
        for each in (await self._client.get(_PATH, chosen)).get("items") or []:
            one = _read(each)
            found[one.name] = one
        return [found[name] for name in sorted(found)]

    async def check(self, name: str) -> None:
        """UnknownNamespace if there is none of that name."""
        if name not in {one.name for one in await self.all()}:
            raise UnknownNamespace(name)

    async def create(self, namespace: Namespace) -> None:
        """NamespaceExists if there is one of that name, with functions or without."""
        self._check_managed()
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": self._metadata(namespace)}
        try:
            await self._client.call("POST", _PATH, body=body)
        except ClusterRefused as refused:
            if refused.status == _CONFLICT:
                raise NamespaceExists(namespace.name) from refused
            raise _bad(refused) from refused

    async def update(self, namespace: Namespace) -> None:
        """Replace what the namespace was given; labels that the cluster added stay."""
        self._check_managed()
        before = await self._labelled(namespace.name)
        wanted = self._metadata(namespace)
        changes = {
            "labels": _changes(before.labels, wanted["labels"]),
            "annotations": _changes(before.annotations, wanted["annotations"]),
        }
        try:
            path = f"{_PATH}/{namespace.name}"
            await self._client.call("PATCH", path, body={"metadata": changes}, kind=MERGE)
        except ClusterRefused as refused:
            raise _bad(refused) from refused

    async def remove(self, name: str) -> None:
        """Remove a namespace with everything in it."""
        self._check_managed()
        if name == DEFAULT_NAMESPACE:
            raise BadRequest(f"the namespace {name} cannot be removed")
        await self._labelled(name)
        await self._client.call("DELETE", f"{_PATH}/{name}")

    def _check_managed(self) -> None:
        if self._fixed:
            raise Unsupported("kubernetes_namespaces names the namespaces of this gateway")

    async def _labelled(self, name: str) -> Namespace:
        """One of ours as it is now; UnknownNamespace of another one."""
        try:
            found = await self._client.get(f"{_PATH}/{name}")
        except ClusterRefused as refused:
            if refused.status == _ABSENT:
                raise UnknownNamespace(name) from refused
            raise
        if (found["metadata"].get("labels") or {}).get(LABEL) != self._name:
            raise UnknownNamespace(name)
        return _read(found)

    def _metadata(self, namespace: Namespace) -> Json:
        return {
            "name": namespace.name,
            "labels": {**namespace.labels, LABEL: self._name},
            "annotations": dict(namespace.annotations),
        }


def _read(found: Json) -> Namespace:
    metadata = found["metadata"]
    labels = dict(metadata.get("labels") or {})
    for name in (LABEL, "kubernetes.io/metadata.name"):
        labels.pop(name, None)
    return Namespace(metadata["name"], labels, dict(metadata.get("annotations") or {}))


def _changes(before: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """A merge patch from one to the other."""
    return {**dict.fromkeys(before), **wanted}


def _bad(refused: ClusterRefused) -> Exception:
    return BadRequest(refused.message) if refused.status == _INVALID else refused
