"""The routes below /system: functions, scaling, secrets, namespaces, alerts, logs, info."""

import asyncio
import logging
import math
import platform
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from common import build_identity
from common.foreign_text import plain
from common.http.asgi import App, Receive, Scope, Send, send_text, until_disconnected
from common.numerals import whole
from common.tasks import until_first
from gateway_ext.error_statuses import headers_of, status_of
from gateway_ext.errors import BadRequest, GatewayError, ProviderFailed, UnknownNamespace
from gateway_ext.metrics import GatewayMeters
from gateway_ext.model import DEFAULT_NAMESPACE, FunctionId, FunctionStatus, Namespace
from gateway_ext.openfaas import function_options, valid_names, wire
from gateway_ext.openfaas.function_options import FunctionOptions
from gateway_ext.openfaas.json_answers import (
    body_of,
    disk_failed,
    done,
    failed,
    no_route,
    route,
    shown,
)
from gateway_ext.ports import LogQuery, Provider
from gateway_ext.settings import GatewaySettings

_log = logging.getLogger(__name__)

# More in one order are a slip of the keyboard.
_MOST_REPLICAS = 1_000

Ordering = Callable[[FunctionId], AbstractContextManager[object]]

LargestGpu = Callable[[], int | None]  # its bytes; None while no GPU is known
NamespaceRemoved = Callable[[str], Awaitable[None]]

_CREATED = 201


def make_system(
    provider: Provider,
    counts: GatewayMeters,
    settings: GatewaySettings,
    largest_gpu_bytes: LargestGpu,
    *,
    ordering: Ordering = nullcontext,
    namespace_removed: NamespaceRemoved,
) -> App:
    """The application for all paths below /system but logs and jobs; it checks no credentials.

    While no GPU is known every memory size is accepted. A function is deployed and scaled within
    the context `ordering`. `namespace_removed` removes what others than the provider keep of one.
    """
    system = _System(provider, counts, settings, largest_gpu_bytes, ordering, namespace_removed)
    routes = [
        route("/system/functions", GET=system.list, POST=partial(system.deploy, update=False),
               PUT=partial(system.deploy, update=True), DELETE=system.remove),
        route("/system/function/{name}", GET=system.show),
        route("/system/scale-function/{name}", POST=system.scale),
        route("/system/alert", POST=system.alert),
        route("/system/info", GET=system.info),
        route("/system/namespaces", GET=system.namespaces),
        *(
            route(path, GET=system.namespace, POST=system.create_namespace,
                   PUT=system.update_namespace, DELETE=system.remove_namespace)
            for path in ("/system/namespace", "/system/namespace/", "/system/namespace/{name}")
        ),
        route("/system/secrets", GET=system.secrets, POST=system.create_secret,
               PUT=system.update_secret, DELETE=system.remove_secret),
    ]  # fmt: skip
    app = Starlette(
        routes=routes,
        exception_handlers={GatewayError: failed, HTTPException: no_route, OSError: disk_failed},
    )
    app.router.redirect_slashes = False
    return app


@dataclass(frozen=True, slots=True)
class _System:
    provider: Provider
    counts: GatewayMeters
    settings: GatewaySettings
    largest_gpu_bytes: LargestGpu
    ordering: Ordering
    namespace_removed: NamespaceRemoved
    # Read at the start: a checkout may be changed while it runs.
    release: str = field(default_factory=build_identity.release)
    sha: str = field(default_factory=build_identity.commit)

    # -- functions -------------------------------------------------------------------------------

    async def list(self, request: Request) -> Response:
        statuses = await self.provider.functions(_namespace(request))
        return shown([self._shown(self._as_listed(status)) for status in statuses])

    def _as_listed(self, status: FunctionStatus) -> FunctionStatus:
        """faas-cli lists `replicas` alone: of a function in trouble, those that are there."""
        if status.trouble and self.settings.role == "gateway":
            return replace(status, replicas=status.available_replicas)
        return status

    async def show(self, request: Request) -> Response:
        usage = request.query_params.get("usage", "").lower() in {"1", "t", "true"}
        return shown(self._shown(await self.provider.function(_function(request), usage=usage)))

    async def deploy(self, request: Request, *, update: bool) -> Response:
        wanted = wire.deployment(await body_of(request))
        _check_replicas(function_options.of(wanted).scale_max)
        function_options.refuse_longer(wanted, self.settings.longest_timeout_s)
        if (largest_bytes := self.largest_gpu_bytes()) is not None:
            function_options.refuse_beyond(wanted, largest_bytes)
        with self.ordering(wanted.id):
            await self.provider.deploy(wanted, update=update)
        _log.info("%s %s: %s", "updated" if update else "deployed", wanted.id, wanted.image)
        return done()

    async def remove(self, request: Request) -> Response:
        namespace = request.query_params.get("namespace", "")
        function = wire.function_to_remove(await body_of(request), namespace)
        await self.provider.remove(function)
        _log.info("removed %s", function)
        return done()

    async def scale(self, request: Request) -> Response:
        sent = wire.scaling(await body_of(request))
        function = _function(request, sent.namespace)
        _check_replicas(sent.replicas)
        await self._scale(function, sent.replicas)
        _log.info("scaled %s to %d", function, sent.replicas)
        return done()

    async def alert(self, request: Request) -> Response:
        """Carry out all alerts; one that fails does not stop the others."""
        failures: list[str] = []
        kind: type[GatewayError] = BadRequest
        for alert in wire.alerts(await body_of(request)):
            try:
                await self._apply_alert(alert)
            except GatewayError as error:
                failures.append(f"{plain(alert.function) or 'no function_name'}: {error}")
                kind = kind if isinstance(error, BadRequest) else ProviderFailed
        if failures:
            raise kind("; ".join(failures))
        return done(200)

    async def _apply_alert(self, alert: wire.Alert) -> None:
        function = valid_names.function_id(alert.function)
        status = await self.provider.function(function, usage=False)
        options = function_options.of(status.deployment)
        replicas = after_alert(status.replicas, options, firing=alert.firing)
        if replicas != status.replicas:
            _log.info("an alert scales %s from %d to %d", function, status.replicas, replicas)
            await self._scale(function, replicas)

    async def _scale(self, function: FunctionId, replicas: int) -> None:
        with self.ordering(function):
            await self.provider.scale(function, replicas)

    def _shown(self, status: FunctionStatus) -> wire.Json:
        return wire.status_json(status, self.counts.invocations_of(str(status.deployment.id)))

    # -- info, namespaces and secrets --------------------------------------------------------------

    async def info(self, request: Request) -> Response:
        """Flat for a gateway that asks its provider, nested for faas-cli that asks a gateway."""
        del request
        version = {"sha": self.sha, "release": self.release, "commit_message": ""}
        flat = {"provider": "gpufaas", "version": version, "orchestration": self.provider.name}
        if self.settings.role == "provider":
            return shown(flat)
        return shown({"provider": flat, "version": version, "arch": platform.machine()})

    async def namespaces(self, request: Request) -> Response:
        del request
        return shown([namespace.name for namespace in await self.provider.namespaces()])

    async def namespace(self, request: Request) -> Response:
        wanted = valid_names.namespace_name(request.path_params.get("name", ""))
        for namespace in await self.provider.namespaces():
            if namespace.name == wanted:
                return shown(wire.namespace_json(namespace))
        raise UnknownNamespace(wanted)

    async def create_namespace(self, request: Request) -> Response:
        namespace = await self._namespace(request)
        await self.provider.create_namespace(namespace)
        _log.info("made the namespace %s", namespace.name)
        return done(_CREATED)

    async def update_namespace(self, request: Request) -> Response:
        await self.provider.update_namespace(await self._namespace(request))
        return done()

    async def remove_namespace(self, request: Request) -> Response:
        namespace = await self._namespace(request)
        if namespace.name == DEFAULT_NAMESPACE:
            raise BadRequest(f"{DEFAULT_NAMESPACE} cannot be removed: it is the default namespace")
        try:
            await self.provider.remove_namespace(namespace.name)
        except UnknownNamespace:  # the rest may be of an earlier try that failed after this
            await self.namespace_removed(namespace.name)
            raise
        await self.namespace_removed(namespace.name)
        _log.info("removed the namespace %s", namespace.name)
        return done()

    async def secrets(self, request: Request) -> Response:
        namespace = _namespace(request)
        secrets = await self.provider.secrets(namespace)
        return shown([{"name": name, "namespace": namespace} for name in secrets])

    async def create_secret(self, request: Request) -> Response:
        await self.provider.create_secret(*await self._secret(request))
        return done()

    async def update_secret(self, request: Request) -> Response:
        await self.provider.update_secret(*await self._secret(request))
        return done()

    async def remove_secret(self, request: Request) -> Response:
        secret = await self._secret(request)
        await self.provider.remove_secret(secret.namespace, secret.name)
        return done()

    async def _namespace(self, request: Request) -> Namespace:
        return wire.namespace(await body_of(request), request.path_params.get("name", ""))

    async def _secret(self, request: Request) -> wire.Secret:
        return wire.secret(await body_of(request), request.query_params.get("namespace", ""))


def _check_replicas(replicas: int) -> None:
    if replicas > _MOST_REPLICAS:
        text = f"{replicas} replicas are more than the {_MOST_REPLICAS} that may be asked"
        raise BadRequest(text)


def _namespace(request: Request) -> str:
    return valid_names.namespace_or_default(request.query_params.get("namespace", ""))


def _function(request: Request, namespace: str = "") -> FunctionId:
    """The function that the path names; its namespace is in the query, else in the body."""
    given = request.query_params.get("namespace", "") or namespace
    return valid_names.function_id(request.path_params["name"], given)


_ALL_PERCENT = 100


def after_alert(replicas: int, options: FunctionOptions, *, firing: bool) -> int:
    """One step up while the alert fires, a share of the maximum; the minimum once it is over."""
    if not firing:
        return options.scale_min
    step = math.ceil(options.scale_max * options.scale_factor / _ALL_PERCENT)
    return max(options.scale_min, min(options.scale_max, replicas + step)) if step else replicas


_NDJSON = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
_UNPROCESSABLE, _NOT_ALLOWED = 422, 405
_LINES_OF_A_TURN = 64
_TRUE = frozenset({"1", "t", "true"})


class Logs:
    """Sends log lines as they arrive; ends with the reader, or when the gateway closes."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End every response that follows a log."""
        self._closing.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; an error is sent before the first line."""
        if scope["method"] not in {"GET", "HEAD"}:
            await send_text(send, _NOT_ALLOWED, "GET is expected", [(b"allow", b"GET, HEAD")])
            return
        try:
            query = _query(scope)
        except BadRequest as error:
            await send_text(send, _UNPROCESSABLE, str(error))
            return
        try:
            await self._provider.function(query.function, usage=False)
        except GatewayError as error:
            await send_text(send, status_of(error), str(error), headers_of(error))
            return
        await send({"type": "http.response.start", "status": 200, "headers": _NDJSON})
        # Lines already written are sent at once, even if none follows for a long time.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        if scope["method"] == "GET":
            await until_first(
                self._send_lines(query, send), until_disconnected(receive), self._closing.wait()
            )
        await send({"type": "http.response.body", "body": b""})

    async def _send_lines(self, query: LogQuery, send: Send) -> None:
        sent = 0
        async with aclosing(self._provider.logs(query)) as lines:
            async for line in lines:
                part = wire.log_line(line)
                await send({"type": "http.response.body", "body": part, "more_body": True})
                sent += 1
                if sent % _LINES_OF_A_TURN == 0:  # thousands of stored lines need no waiting
                    await asyncio.sleep(0)


def _query(scope: Scope) -> LogQuery:
    sent = {
        name: values[-1]
        for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()
    }
    since = sent.get("since")
    try:
        tail = whole(sent.get("tail") or "0")
        after = wire.time_of(since) if since else None
    except ValueError as error:
        raise BadRequest(f"tail is a number, since a time of RFC 3339: {error}") from error
    return LogQuery(
        function=valid_names.function_id(sent.get("name", ""), sent.get("namespace", "")),
        instance=sent.get("instance", ""),
        tail=tail if tail > 0 else None,
        since=after,
        follow=sent.get("follow", "").lower() in _TRUE,
    )
