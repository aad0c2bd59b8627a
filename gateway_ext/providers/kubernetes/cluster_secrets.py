"""Secrets of functions, as Secrets of the cluster with one key, which is their name."""

from base64 import b64encode
from collections.abc import Sequence

from gateway_ext.errors import BadRequest, SecretExists, UnknownNamespace, UnknownSecret
from gateway_ext.providers.kubernetes.cluster_client import MERGE, ClusterClient, ClusterRefused
from gateway_ext.providers.kubernetes.function_manifest import GATEWAY

_ABSENT, _CONFLICT, _INVALID = 404, 409, 422


class ClusterSecrets:
    """Secrets that carry this gateway's label; others of the cluster are neither shown nor used."""

    def __init__(self, client: ClusterClient, name: str) -> None:
        self._client = client
        self._name = name

    async def names(self, namespace: str) -> Sequence[str]:
        """Names of the secrets of a namespace."""
        chosen = {"labelSelector": f"{GATEWAY}={self._name}"}
        found = await self._client.get(_path(namespace), chosen)
        return sorted(str(each["metadata"]["name"]) for each in found.get("items") or [])

    async def create(self, namespace: str, name: str, value: bytes) -> None:
        """SecretExists if there is one of that name, this gateway's or another one."""
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {"name": name, "labels": {GATEWAY: self._name}},
            "data": {name: b64encode(value).decode()},
        }
        try:
            await self._client.call("POST", _path(namespace), body=body)
        except ClusterRefused as refused:
            if refused.status == _CONFLICT:
                raise SecretExists(namespace, name) from refused
            if refused.status == _ABSENT:
                raise UnknownNamespace(namespace) from refused
            if refused.status == _INVALID:
                raise BadRequest(refused.message) from refused
            raise

    async def update(self, namespace: str, name: str, value: bytes) -> None:
        """UnknownSecret if there is none of that name."""
        await self._check(namespace, name)
        body = {"data": {name: b64encode(value).decode()}}
        await self._client.call("PATCH", _path(namespace, name), body=body, kind=MERGE)

    async def remove(self, namespace: str, name: str) -> None:
        """UnknownSecret if there is none of that name."""
        await self._check(namespace, name)
        await self._client.call("DELETE", _path(namespace, name))

    async def _check(self, namespace: str, name: str) -> None:
        if name not in await self.names(namespace):
            raise UnknownSecret(namespace, name)


def _path(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/secrets" + (f"/{name}" if name else "")
