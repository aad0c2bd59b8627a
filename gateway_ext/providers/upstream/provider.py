"""Runs functions on another faas-provider: forwards requests to it, and polls what it has."""

import asyncio
import contextlib
import hashlib
import json
import logging
import threading
from base64 import b64encode
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from common.tasks import BackgroundTasks
from common.time_limits import time_limit
from common.whole_files import put_file
from gateway_ext import bounded_json
from gateway_ext.bounded_json import MOST_OF_PROVIDERS
from gateway_ext.errors import (
    BadDeployment,
    BadRequest,
    GatewayError,
    NamespaceExists,
    ProviderFailed,
    SecretExists,
    TooLarge,
    UnknownFunction,
    UnknownNamespace,
    UnknownSecret,
    Unsupported,
)
from gateway_ext.model import (
    DEFAULT_NAMESPACE,
    Deployment,
    Endpoint,
    FunctionId,
    FunctionStatus,
    LogLine,
    Namespace,
    Resources,
)
from gateway_ext.openfaas import function_options, wire
from gateway_ext.ports import FunctionListener, Injection, LogQuery
from gateway_ext.providers.function_environment import (
    batch_settings,
    gpu_environment,
    without_shim_path,
)
from gateway_ext.providers.upstream.client import ProviderHttp, ProviderSite, provider_site
from gateway_ext.settings import GatewaySettings

_log = logging.getLogger(__name__)

_FILE = "upstream.json"
# Labels and annotations with these prefixes are ours, and not sent to the other provider.
_KEPT_HERE = (function_options.OURS, function_options.SCALING)


class Extras(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of one deployment that stays with this gateway.

    `injected` names the variables that were added, `replaced` has the function's own variables of
    the same names, and `digest` differs when other variables would be added today.
    """

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    limits_gpu: str = ""
    requests_gpu: str = ""
    injected: tuple[str, ...] = ()
    replaced: dict[str, str] = {}
    digest: str = ""


NOTHING = Extras()
_DAMAGE = (ValueError, TypeError, LookupError, RecursionError, msgspec.ValidationError)


def parted(
    wanted: Deployment, strip: Collection[str], injected: Mapping[str, str]
) -> tuple[Deployment, Extras]:
    """Split a deployment: keys that begin with one of `strip`, and amounts of GPUs, stay here."""
    prefixes = tuple(strip)
    environment = wanted.environment
    extras = Extras(
        labels=_beginning(wanted.labels, prefixes),
        annotations=_beginning(wanted.annotations, prefixes),
        limits_gpu=wanted.limits.gpu if wanted.limits else "",
        requests_gpu=wanted.requests.gpu if wanted.requests else "",
        injected=tuple(sorted(injected)),
        replaced={name: environment[name] for name in sorted(injected) if name in environment},
        digest=digest(injected),
    )
    forwarded = replace(
        wanted,
        labels=_without(wanted.labels, extras.labels),
        annotations=_without(wanted.annotations, extras.annotations),
        limits=_with_gpu(wanted.limits, ""),
        requests=_with_gpu(wanted.requests, ""),
        environment={**environment, **injected},
    )
    return forwarded, extras


def merged(forwarded: Deployment, extras: Extras) -> Deployment:
    """The inverse of `parted`: the deployment as it was sent to this gateway."""
    own = _without(forwarded.environment, dict.fromkeys(extras.injected, ""))
    return replace(
        forwarded,
        labels={**forwarded.labels, **extras.labels},
        annotations={**forwarded.annotations, **extras.annotations},
        limits=_with_gpu(forwarded.limits, extras.limits_gpu),
        requests=_with_gpu(forwarded.requests, extras.requests_gpu),
        environment={**own, **extras.replaced},
    )


def digest(injected: Mapping[str, str]) -> str:
    """A digest of the injected variables, which hides the credentials in them."""
    if not injected:
        return ""
    return hashlib.sha256(json.dumps(sorted(injected.items())).encode()).hexdigest()


def _beginning(values: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, value in values.items() if key.startswith(prefixes)}


def _without(values: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in values.items() if key not in others}


def _with_gpu(amounts: Resources | None, gpu: str) -> Resources | None:
    completed = replace(amounts or Resources(), gpu=gpu)
    return completed if completed != Resources() else None


class ExtrasFile:
    """Extras by function; a change is on disk when `put` returns.

    `put` waits for the disk, so it is called in threads; a lock orders the writes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = threading.Lock()
        self._extras = _read(path)

    def __getitem__(self, function: FunctionId) -> Extras:
        return self._extras.get(function, NOTHING)

    def functions(self) -> list[FunctionId]:
        return sorted(self._extras)

    def put(self, function: FunctionId, extras: Extras) -> None:
        """Store the extras of a function; empty extras delete its entry."""
        with self._writing:
            if self[function] == extras:
                return
            changed = dict(self._extras)
            changed.pop(function, None)
            if extras != NOTHING:
                changed[function] = extras
            _write(self._path, changed)
            self._extras = changed


def _read(path: Path) -> dict[FunctionId, Extras]:
    try:
        return {
            msgspec.convert([entry["namespace"], entry["name"]], FunctionId): (
                msgspec.convert(entry, Extras)
            )
            for entry in json.loads(path.read_bytes())["functions"]
        }
    except FileNotFoundError:
        return {}
    except _DAMAGE as error:
        raise ProviderFailed(f"{path} is damaged: {error}; move it away to continue") from error


def _write(path: Path, extras: dict[FunctionId, Extras]) -> None:
    functions = [{**id_._asdict(), **msgspec.to_builtins(extras[id_])} for id_ in sorted(extras)]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    put_file(path, json.dumps({"functions": functions}, indent=1).encode(), 0o600)


class UpstreamProvider:
    """Functions of the provider at `upstream_url`; their extras are stored in the state folder.

    All its functions are looked at every `poll_s`.
    """

    name = "upstream"

    def __init__(
        self, settings: GatewaySettings, injection: Injection | None = None, *, poll_s: float = 5.0
    ) -> None:
        site = provider_site(settings.upstream_url)
        self._http = ProviderHttp(
            site, settings.upstream_user, _password(settings), settings.upstream_timeout_s
        )
        self._extras = ExtrasFile(Path(settings.state_dir) / _FILE)
        self._injection = injection
        # One caller at a time changes the extras and the forwarded part of a function.
        self._locks: WeakValueDictionary[FunctionId, asyncio.Lock] = WeakValueDictionary()
        self._poll = FunctionPoll(site, self._everything, poll_s)

    async def start(self, listener: FunctionListener) -> None:
        """Poll for the first time; ProviderFailed if the other provider cannot be reached."""
        await self._http.open()
        try:
            await self._catch_up()
            await self._poll.start(listener)
        except BaseException:
            await self._http.close()
            raise

    async def close(self) -> None:
        """Stop polling; the other provider's functions continue to run."""
        await self._poll.close()
        await self._http.close()

    async def deploy(self, deployment: Deployment, *, update: bool) -> None:
        id_ = deployment.id
        async with self._locks.setdefault(id_, asyncio.Lock()):
            if not update:
                update = await self._is_there(id_)
            await self._send(deployment, update=update)
        await self._poll.poll_now()

    async def remove(self, function: FunctionId) -> None:
        body = {"functionName": function.name, "namespace": function.namespace}
        missing = UnknownFunction(function)
        query = _in(function.namespace)
        async with self._locks.setdefault(function, asyncio.Lock()):
            try:
                await self._http.call("DELETE", "/system/functions", query, body, missing=missing)
            except UnknownFunction:
                await self._store(function, NOTHING)
                raise
            await self._store(function, NOTHING)
        await self._poll.poll_now()

    async def scale(self, function: FunctionId, replicas: int) -> None:
        name, namespace = function.name, function.namespace
        body = {"serviceName": name, "replicas": replicas, "namespace": namespace}
        path, missing = f"/system/scale-function/{name}", UnknownFunction(function)
        # Orders arrive there in the order in which they were given here.
        async with self._locks.setdefault(function, asyncio.Lock()):
            await self._http.call("POST", path, _in(namespace), body, missing=missing)
        await self._poll.poll_now()

    async def functions(self, namespace: str) -> Sequence[FunctionStatus]:
        missing = UnknownNamespace(namespace)
        answer = await self._http.call("GET", "/system/functions", _in(namespace), missing=missing)
        with _upstream_fault("its functions"):
            statuses = [wire.status_of(sent, namespace) for sent in _list(answer)]
        statuses = [self._completed(status) for status in statuses]
        return sorted(statuses, key=lambda status: status.deployment.id)

    async def function(self, function: FunctionId, *, usage: bool) -> FunctionStatus:
        query = _in(function.namespace) | ({"usage": "1"} if usage else {})
        path, missing = f"/system/function/{function.name}", UnknownFunction(function)
        answer = await self._http.call("GET", path, query, missing=missing)
        with _upstream_fault("its function"):
            status = wire.status_of(bounded_json.parsed(answer), function.namespace)
        return self._completed(status)

    async def logs(self, query: LogQuery) -> AsyncGenerator[LogLine, None]:
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
        lines = self._http.lines("/system/logs", sent, UnknownFunction(function))
        async with aclosing(lines):
            async for line in lines:
                if line.strip():
                    with _upstream_fault("a line of its log"):
                        log_line = wire.log_line_of(line, function)
                    yield log_line

    # -- secrets and namespaces ------------------------------------------------------------------

    def template_bytes(self) -> Mapping[FunctionId, int]:
        """Nothing: an upstream provider has no templates."""
        return {}

    async def secrets(self, namespace: str) -> Sequence[str]:
        answer = await self._http.call("GET", "/system/secrets", _in(namespace))
        with _upstream_fault("its secrets"):
            return sorted(wire.secret_name_of(secret) for secret in _list(answer))

    async def create_secret(self, namespace: str, name: str, value: bytes) -> None:
        exists = SecretExists(namespace, name)
        await self._secret("POST", namespace, name, value, exists=exists)

    async def update_secret(self, namespace: str, name: str, value: bytes) -> None:
        missing = UnknownSecret(namespace, name)
        await self._secret("PUT", namespace, name, value, missing=missing)

    async def remove_secret(self, namespace: str, name: str) -> None:
        missing = UnknownSecret(namespace, name)
        await self._secret("DELETE", namespace, name, None, missing=missing)

    async def namespaces(self) -> Sequence[Namespace]:
        """Labels and annotations take one more request for each namespace."""
        return [await self._namespace(name) for name in await self._namespace_names()]

    async def create_namespace(self, namespace: Namespace) -> None:
        body, exists = wire.namespace_json(namespace), NamespaceExists(namespace.name)
        await self._http.call("POST", "/system/namespace/", body=body, exists=exists)

    async def update_namespace(self, namespace: Namespace) -> None:
        body, missing = wire.namespace_json(namespace), UnknownNamespace(namespace.name)
        path = f"/system/namespace/{namespace.name}"
        await self._http.call("PUT", path, body=body, missing=missing)

    async def remove_namespace(self, name: str) -> None:
        path, missing = f"/system/namespace/{name}", UnknownNamespace(name)
        await self._http.call("DELETE", path, body={"name": name}, missing=missing)
        for function in self._extras.functions():
            if function.namespace == name:
                await self._store(function, NOTHING)
        await self._poll.poll_now()

    async def _secret(
        self, method: str, namespace: str, name: str, value: bytes | None, **means: Any
    ) -> None:
        body = {"name": name, "namespace": namespace}
        if value is not None:
            # Older providers read the text only; newer ones prefer the bytes.
            body["rawValue"] = b64encode(value).decode()
            body["value"] = value.decode("utf-8", "replace")
        await self._http.call(method, "/system/secrets", _in(namespace), body, **means)

    async def _namespace(self, name: str) -> Namespace:
        try:
            answer = await self._http.call(
                "GET", f"/system/namespace/{name}", missing=UnknownNamespace(name)
            )
            with _upstream_fault("its namespace"):
                sent = bounded_json.decoded(answer, wire.SentNamespace)
                return Namespace(name, sent.labels, sent.annotations)
        except (Unsupported, UnknownNamespace):
            return Namespace(name)

    async def _namespace_names(self) -> list[str]:
        """The default namespace alone if the provider does not have this route."""
        try:
            answer = await self._http.call(
                "GET", "/system/namespaces", missing=UnknownNamespace(DEFAULT_NAMESPACE)
            )
        except (Unsupported, UnknownNamespace):
            return [DEFAULT_NAMESPACE]
        with _upstream_fault("its namespaces"):
            names = _list(answer)
            if not all(isinstance(name, str) for name in names):
                raise BadRequest("namespaces must be texts")
            return sorted({*names, DEFAULT_NAMESPACE})

    # -- the part of a deployment that stays here ------------------------------------------------

    async def _send(self, deployment: Deployment, *, update: bool) -> None:
        """Store the extras, then forward the rest; the extras are restored if that is refused."""
        id_ = deployment.id
        forwarded, extras = parted(deployment, _KEPT_HERE, self._injected(deployment))
        before = self._extras[id_]
        await self._store(id_, extras)
        try:
            await self._http.call(
                "PUT" if update else "POST",
                "/system/functions",
                _in(id_.namespace),
                wire.deployment_json(forwarded),
                missing=UnknownFunction(id_) if update else UnknownNamespace(id_.namespace),
            )
        except GatewayError:
            await self._store(id_, before)
            raise

    async def _store(self, function: FunctionId, extras: Extras) -> None:
        await asyncio.to_thread(self._extras.put, function, extras)

    def _injected(self, deployment: Deployment) -> Mapping[str, str]:
        """Variables that activate the shim, whose path is set in the image, and lists of calls."""
        shim = without_shim_path(gpu_environment(self._injection, deployment))
        return shim | batch_settings(function_options.of(deployment))

    def _completed(self, status: FunctionStatus) -> FunctionStatus:
        """The status with the extras; `trouble` says what another client wrote wrongly."""
        deployment = merged(status.deployment, self._extras[status.deployment.id])
        try:
            function_options.of(deployment)
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
        statuses: list[FunctionStatus] = []
        for namespace in await self._namespace_names():
            try:
                statuses += await self.functions(namespace)
            except UnknownNamespace:
                _log.info("the namespace %s was removed during a poll", namespace)
        return statuses

    async def _catch_up(self) -> None:
        """Delete the extras of functions that were removed while this gateway did not run.

        GPU functions are deployed again whose injected addresses or credentials have changed.
        """
        deployments = {one.deployment.id: one.deployment for one in await self._everything()}
        for function in self._extras.functions():
            if function not in deployments:
                await self._store(function, NOTHING)
        for deployment in deployments.values():
            try:
                injected = self._injected(deployment)
                if digest(injected) == self._extras[deployment.id].digest:
                    continue
                _log.info("%s is deployed again: its injected variables changed", deployment.id)
                await self._send(deployment, update=True)
            except GatewayError as error:
                _log.warning("%s keeps its injected variables: %s", deployment.id, error)


@contextmanager
def _upstream_fault(what: str) -> Iterator[None]:
    """Raise ProviderFailed for a bad answer: the other provider's fault, not the caller's."""
    try:
        yield
    except (BadRequest, TooLarge) as error:
        raise ProviderFailed(f"the upstream provider does not give {what}: {error}") from error


def _in(namespace: str) -> dict[str, str]:
    return {"namespace": namespace}


def _list(answer: bytes) -> list[Any]:
    """The list in an answer; Go writes null for an empty one."""
    value = bounded_json.parsed(answer, MOST_OF_PROVIDERS)
    if not isinstance(value, list | None):
        raise BadRequest("a list is expected")
    return value or []


def _password(settings: GatewaySettings) -> str:
    if not settings.upstream_password_file:
        return ""
    path = Path(settings.upstream_password_file)
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ProviderFailed(f"upstream_password_file {path}: {error.strerror}") from error


# The short interval, used while replicas are missing, and for how long it is used.
_SOON_S, _PATIENCE_S = 0.2, 60.0


@dataclass(eq=False)
class FunctionPoll:
    """Keeps one listener up to date about all functions; polls never overlap."""

    site: ProviderSite
    everything: Callable[[], Awaitable[Sequence[FunctionStatus]]]
    every_s: float

    def __post_init__(self) -> None:
        self._listener: FunctionListener | None = None
        self._reported: dict[FunctionId, tuple[Deployment, int, int]] = {}
        self._unsettled = False
        self._short_until_s = 0.0
        self._polling = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tasks = BackgroundTasks(_log, "polling the upstream provider")
        self._failed = False

    async def start(self, listener: FunctionListener) -> None:
        """Poll once, then regularly; a failure of the first poll is raised."""
        self._listener = listener
        self._shorten_interval()
        await self._poll()
        self._tasks.start(self._run())

    async def close(self) -> None:
        await self._tasks.close()

    async def poll_now(self) -> None:
        """Poll after a change; unless that fails, the listener knows of it when this returns."""
        self._shorten_interval()
        await self._try_to_poll()
        self._wake.set()

    async def _run(self) -> None:
        while True:
            near = self._unsettled and asyncio.get_running_loop().time() < self._short_until_s
            with contextlib.suppress(TimeoutError):
                async with time_limit(min(_SOON_S, self.every_s) if near else self.every_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._try_to_poll()

    async def _try_to_poll(self) -> None:
        """While the other provider cannot be reached, the listener keeps what was reported."""
        try:
            await self._poll()
        except GatewayError as error:
            if not self._failed:
                _log.warning("the upstream provider cannot be asked: %s", error)
            self._failed = True
            return
        if self._failed:
            _log.info("the upstream provider answers again")
        self._failed = False

    async def _poll(self) -> None:
        async with self._polling:
            statuses = {status.deployment.id: status for status in await self.everything()}
            assert self._listener is not None, "polled only after the start"
            for function in [id_ for id_ in self._reported if id_ not in statuses]:
                del self._reported[function]
                self._listener.function_gone(function)
            for status in statuses.values():
                self._report(self._listener, status)
            self._unsettled = any(
                status.available_replicas < status.replicas for status in statuses.values()
            )

    def _report(self, listener: FunctionListener, status: FunctionStatus) -> None:
        id_ = status.deployment.id
        now = (status.deployment, status.available_replicas, status.replicas)
        if self._reported.get(id_) == now:
            return
        self._reported[id_] = now
        endpoints = [self._endpoint(id_, number) for number in range(status.available_replicas)]
        try:
            listener.function_is(status.deployment, endpoints, wanted=status.replicas)
        except BadDeployment as error:
            _log.warning("%s was deployed elsewhere, and is not served: %s", id_, error)

    def _endpoint(self, function: FunctionId, number: int) -> Endpoint:
        """One endpoint for each replica, so that limits for each instance apply as they should.

        The endpoints differ in their names only: the other provider chooses the replica of a call.
        """
        prefix = f"{self.site.path}/function/{function}"
        return Endpoint(f"{function}/{number}", f"tcp:{self.site.address}", prefix)

    def _shorten_interval(self) -> None:
        self._short_until_s = asyncio.get_running_loop().time() + _PATIENCE_S
