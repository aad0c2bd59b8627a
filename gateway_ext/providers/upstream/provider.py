"""The provider itself: deploys, scales and lists elsewhere, and keeps its listener up to date."""

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from gateway_ext import fields, wire, wishes
from gateway_ext.errors import (
    BadDeployment,
    BadRequest,
    GatewayError,
    NamespaceExists,
    ProviderFailed,
    SecretExists,
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
from gateway_ext.ports import Injection, Listener, LogQuery
from gateway_ext.providers.upstream.asking import Asking, site_of
from gateway_ext.providers.upstream.extras import NOTHING, Extras, digest, merged, parted
from gateway_ext.providers.upstream.kept import Kept
from gateway_ext.providers.upstream.watch import Watch
from gateway_ext.settings import GatewaySettings

_log = logging.getLogger(__name__)

_FILE = "upstream.json"
_SHIM_PATH = "PYTHONPATH"


class UpstreamProvider:
    """Functions run where `upstream_url` says; our part of each is kept in the state folder."""

    name = "upstream"

    def __init__(self, settings: GatewaySettings, injection: Injection | None = None) -> None:
        site = site_of(settings.upstream_url)
        self._asking = Asking(
            site, settings.upstream_user, _password(settings), settings.upstream_timeout_s
        )
        self._kept = Kept(Path(settings.state_dir) / _FILE)
        self._strip = settings.upstream_strip
        self._injection = injection
        self._locks: WeakValueDictionary[FunctionId, asyncio.Lock] = WeakValueDictionary()
        self._watch = Watch(site, self._everything, settings.upstream_poll_s)

    async def start(self, listener: Listener) -> None:
        """Ask what there is; ProviderFailed where the other provider cannot be asked."""
        await self._asking.open()
        try:
            await self._forget_removed()
            await self._renew_injected()
            await self._watch.start(listener)
        except BaseException:
            await self._asking.close()
            raise

    async def close(self) -> None:
        """Its functions go on where they are."""
        await self._watch.close()
        await self._asking.close()

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        id_ = deployment.id
        async with self._changing(id_):
            if not update:
                update = await self._is_there(id_)
            await self._send(deployment, update=update)
        await self._watch.look_now()

    async def remove(self, function: FunctionId) -> None:
        body = {"functionName": function.name, "namespace": function.namespace}
        missing = UnknownFunction(function)
        query = _in(function.namespace)
        async with self._changing(function):
            try:
                await self._asking.ask("DELETE", "/system/functions", query, body, missing=missing)
            except UnknownFunction:
                await self._keep(function, NOTHING)
                raise
            await self._keep(function, NOTHING)
        await self._watch.look_now()

    async def scale(self, function: FunctionId, replicas: int) -> None:
        name, namespace = function.name, function.namespace
        body = {"serviceName": name, "replicas": replicas, "namespace": namespace}
        path, missing = f"/system/scale-function/{name}", UnknownFunction(function)
        await self._asking.ask("POST", path, _in(namespace), body, missing=missing)
        await self._watch.look_now()

    async def functions(self, namespace: str) -> Sequence[FunctionStatus]:
        missing = UnknownNamespace(namespace)
        said = await self._asking.ask("GET", "/system/functions", _in(namespace), missing=missing)
        with _understanding("its functions"):
            found = wire.objects(_list(fields.parsed(said)), "functions")
            statuses = [wire.status_of(sent, namespace) for sent in found]
        statuses = [self._completed(status) for status in statuses]
        return sorted(statuses, key=lambda status: status.deployment.id)

    async def function(self, function: FunctionId, *, usage: bool) -> FunctionStatus:
        query = _in(function.namespace) | ({"usage": "1"} if usage else {})
        path, missing = f"/system/function/{function.name}", UnknownFunction(function)
        said = await self._asking.ask("GET", path, query, missing=missing)
        with _understanding("its function"):
            status = wire.status_of(fields.Fields.of(said), function.namespace)
        return self._completed(status)

    async def logs(self, query: LogQuery) -> AsyncIterator[LogLine]:
        function = query.function
        sent = {"name": function.name} | _in(function.namespace)
        if query.instance:
            sent["instance"] = query.instance
        if query.tail is not None:
            sent["tail"] = str(query.tail)
        if query.since is not None:
            sent["since"] = wire.timestamp(query.since)
        if query.follow:
            sent["follow"] = "1"
        lines = self._asking.lines("/system/logs", sent, UnknownFunction(function))
        async with aclosing(lines):
            async for line in lines:
                if line.strip():
                    with _understanding("a line of its log"):
                        found = wire.log_line_of(fields.Fields.of(line), function)
                    yield found

    # -- secrets and namespaces ------------------------------------------------------------------

    async def secrets(self, namespace: str) -> Sequence[str]:
        said = await self._asking.ask("GET", "/system/secrets", _in(namespace))
        with _understanding("its secrets"):
            found = wire.objects(_list(fields.parsed(said)), "secrets")
            return sorted(each.required("name") for each in found)

    async def create_secret(self, namespace: str, name: str, value: bytes) -> None:
        there = SecretExists(namespace, name)
        await self._secret("POST", namespace, name, value, there=there)

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        missing = UnknownSecret(namespace, name)
        await self._secret("PUT", namespace, name, value, missing=missing)

    async def remove_secret(self, namespace: str, name: str) -> None:
        missing = UnknownSecret(namespace, name)
        await self._secret("DELETE", namespace, name, None, missing=missing)

    async def namespaces(self) -> Sequence[Namespace]:
        """By name; what is attached to one costs another question, and may not be told."""
        return [await self._namespace(name) for name in await self._namespace_names()]

    async def create_namespace(self, namespace: Namespace) -> None:
        body, there = wire.namespace_json(namespace), NamespaceExists(namespace.name)
        await self._asking.ask("POST", "/system/namespace/", body=body, there=there)

    async def update_namespace(self, namespace: Namespace) -> None:
        body, missing = wire.namespace_json(namespace), UnknownNamespace(namespace.name)
        path = f"/system/namespace/{namespace.name}"
        await self._asking.ask("PUT", path, body=body, missing=missing)

    async def remove_namespace(self, name: str) -> None:
        path, missing = f"/system/namespace/{name}", UnknownNamespace(name)
        await self._asking.ask("DELETE", path, body={"name": name}, missing=missing)
        for function in self._kept.functions():
            if function.namespace == name:
                await self._keep(function, NOTHING)
        await self._watch.look_now()

    async def _secret(
        self, method: str, namespace: str, name: str, value: bytes | None, **means: Any
    ) -> None:
        body = {"name": name, "namespace": namespace}
        if value is not None:
            # Older providers know the text alone, newer ones take the bytes where there are any.
            body["rawValue"] = b64encode(value).decode()
            body["value"] = value.decode("utf-8", "replace")
        await self._asking.ask(method, "/system/secrets", _in(namespace), body, **means)

    async def _namespace(self, name: str) -> Namespace:
        try:
            said = await self._asking.ask(
                "GET", f"/system/namespace/{name}", missing=UnknownNamespace(name)
            )
            with _understanding("its namespace"):
                sent = fields.Fields.of(said)
                return Namespace(name, sent.mapping("labels"), sent.mapping("annotations"))
        except (Unsupported, UnknownNamespace):
            return Namespace(name)

    async def _namespace_names(self) -> list[str]:
        """Providers that have but one namespace may not have this route."""
        try:
            said = await self._asking.ask(
                "GET", "/system/namespaces", missing=UnknownNamespace(DEFAULT_NAMESPACE)
            )
        except (Unsupported, UnknownNamespace):
            return [DEFAULT_NAMESPACE]
        with _understanding("its namespaces"):
            found = _list(fields.parsed(said))
            if not all(isinstance(name, str) for name in found):
                raise BadRequest("namespaces must be texts")
            return sorted({*found, DEFAULT_NAMESPACE})

    # -- our part of a deployment ----------------------------------------------------------------

    async def _send(self, deployment: Deployment, *, update: bool) -> None:
        """Our part is kept before it is needed, and is as it was if the other part is refused."""
        id_ = deployment.id
        forwarded, extras = parted(deployment, self._strip, self._injected(deployment))
        before = self._kept[id_]
        await self._keep(id_, extras)
        try:
            await self._asking.ask(
                "PUT" if update else "POST",
                "/system/functions",
                _in(id_.namespace),
                wire.deployment_json(forwarded),
                missing=UnknownFunction(id_) if update else UnknownNamespace(id_.namespace),
            )
        except GatewayError:
            await self._keep(id_, before)
            raise

    async def _keep(self, function: FunctionId, extras: Extras) -> None:
        await asyncio.to_thread(self._kept.put, function, extras)

    def _changing(self, function: FunctionId) -> asyncio.Lock:
        """Our part of a function and the other one change together, for one caller at a time."""
        lock = self._locks.get(function)
        if lock is None:
            lock = self._locks[function] = asyncio.Lock()
        return lock

    def _injected(self, deployment: Deployment) -> Mapping[str, str]:
        """What wakes the shim up, in functions that want a GPU.

        Not where the shim lies: that would be its place on our machine, and the images of our
        template say where it is in them.
        """
        if self._injection is None or not wishes.of(deployment).gpu:
            return {}
        found = self._injection.environment(deployment.id)
        return {name: value for name, value in found.items() if name != _SHIM_PATH}

    def _completed(self, status: FunctionStatus) -> FunctionStatus:
        """As it was deployed through us; what others wrote there may be wrong, which is told."""
        deployment = merged(status.deployment, self._kept[status.deployment.id])
        try:
            wishes.of(deployment)
        except BadDeployment as error:
            return replace(status, deployment=deployment, trouble=str(error))
        return replace(status, deployment=deployment)

    async def _is_there(self, function: FunctionId) -> bool:
        try:
            await self.function(function, usage=False)
        except UnknownFunction:
            return False
        return True

    async def _everything(self) -> list[FunctionStatus]:
        found: list[FunctionStatus] = []
        for namespace in await self._namespace_names():
            try:
                found += await self.functions(namespace)
            except UnknownNamespace:
                _log.info("the namespace %s was removed meanwhile", namespace)
        return found

    async def _forget_removed(self) -> None:
        """What was removed without us leaves nothing here."""
        present = {status.deployment.id for status in await self._everything()}
        for function in self._kept.functions():
            if function not in present:
                await self._keep(function, NOTHING)

    async def _renew_injected(self) -> None:
        """Addresses and credentials of before our start may be wrong now."""
        for status in await self._everything():
            deployment = status.deployment
            try:
                injected = self._injected(deployment)
                if digest(injected) == self._kept[deployment.id].digest:
                    continue
                _log.info("%s is deployed again: its way to a GPU has changed", deployment.id)
                await self._send(deployment, update=True)
            except GatewayError as error:
                _log.warning("%s keeps what it had: %s", deployment.id, error)


@contextmanager
def _understanding(what: str) -> Iterator[None]:
    """What another provider sends wrongly is its fault, not our caller's."""
    try:
        yield
    except BadRequest as error:
        raise ProviderFailed(f"the upstream provider does not say {what}: {error}") from error


def _in(namespace: str) -> dict[str, str]:
    return {"namespace": namespace}


def _list(value: Any) -> list[Any]:
    """Go says null for an empty list."""
    if not isinstance(value, list | None):
        raise BadRequest("a list is wanted")
    return value or []


def _password(settings: GatewaySettings) -> str:
    if not settings.upstream_password_file:
        return ""
    path = Path(settings.upstream_password_file)
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ProviderFailed(f"upstream_password_file {path}: {error.strerror}") from error
