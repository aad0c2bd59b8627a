"""A Kubernetes API server in memory: lists, watches and changes of objects, without controllers."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple
from uuid import uuid4

from aiohttp import web

Json = dict[str, Any]

_PATH = re.compile(
    r"(?P<group>/api/v1|/apis/apps/v1)"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<kind>deployments|pods|secrets|namespaces)"
    r"(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


class _Event(NamedTuple):
    version: int
    kind: str
    type: str
    object: Json


class FakeCluster:
    """Objects by kind, namespace and name; `before_put` runs before an object is replaced.

    While it is `away`, it breaks off every connection that asks.
    """

    def __init__(self) -> None:
        self.away = False
        self.asked_in_vain = 0
        self.logs: dict[str, str] = {}
        self.writes = 0
        self.before_put: Callable[[], None] | None = None
        self.url = ""
        self._objects: dict[tuple[str, str, str], Json] = {}
        self._version = 100
        self._events: list[_Event] = []
        self._forgotten = 0
        self._changed = asyncio.Condition()
        self._watchers: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Answer at `url`."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        self.cut()
        assert self._runner is not None
        await self._runner.cleanup()

    def cut(self) -> None:
        """Break every watch off."""
        for task in list(self._watchers):
            task.cancel()

    def compact(self) -> None:
        """Forget all changes: a watch from an earlier version has expired."""
        self._forgotten = self._version
        self._events.clear()

    def get(self, kind: str, name: str, namespace: str = "openfaas-fn") -> Json | None:
        return self._objects.get((kind, namespace, name))

    async def put(self, kind: str, found: Json, namespace: str = "openfaas-fn") -> None:
        """Have an object in the cluster, as another client would."""
        self._set(kind, namespace, deepcopy(found))
        await self._notify()

    async def delete(self, kind: str, name: str, namespace: str = "openfaas-fn") -> None:
        """Have it gone."""
        found = self._objects.pop((kind, namespace, name))
        self._happened(kind, "DELETED", found)
        await self._notify()

    async def pod(self, function: str, name: str, address: str = "", **status: Any) -> None:
        """A pod of a function; it is ready with an address."""
        deployment = self.get("deployments", function)
        assert deployment is not None
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        ready = {"type": "Ready", "status": "True" if address else "False"}
        shown = {"podIP": address, "conditions": [ready], **status}
        if address:
            shown["containerStatuses"] = [{"containerID": name}]
        await self.put("pods", {"metadata": {"name": name, "labels": labels}, "status": shown})

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _set(self, kind: str, namespace: str, found: Json) -> Json:
        self._version += 1
        metadata = found["metadata"]
        before = self._objects.get((kind, namespace, metadata["name"]))
        metadata["namespace"] = namespace
        metadata["uid"] = before["metadata"]["uid"] if before else str(uuid4())
        metadata.setdefault("creationTimestamp", "2026-01-02T03:04:05Z")
        metadata["resourceVersion"] = str(self._version)
        self._objects[kind, namespace, metadata["name"]] = found
        self._happened(kind, "MODIFIED" if before else "ADDED", found)
        return found

    def _happened(self, kind: str, type_: str, found: Json) -> None:
        if type_ == "DELETED":
            self._version += 1
            found["metadata"]["resourceVersion"] = str(self._version)
        self._events.append(_Event(self._version, kind, type_, deepcopy(found)))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            self.asked_in_vain += 1
            assert request.transport is not None
            request.transport.abort()
        match = _PATH.fullmatch(request.path)
        if match is None:
            return _refused(404, "NotFound", request.path)
        kind, name = match["kind"], match["name"] or ""
        namespace = match["namespace"] or ""
        if request.path.startswith("/api/v1/namespaces/") and match["kind"] == "namespaces":
            namespace = ""
        if match["log"]:
            return web.Response(text=self.logs.get(name, ""))
        if request.method == "GET" and not name:
            if "watch" in request.query:
                return await self._watch(request, kind, namespace)
            return self._list(kind, namespace, request.query)
        answer = self._change(request.method, kind, namespace, name, await request.read())
        await self._notify()
        return answer

    def _list(self, kind: str, namespace: str, query: Mapping[str, str]) -> web.Response:
        items = [
            found
            for (its_kind, its_namespace, _), found in self._objects.items()
            if its_kind == kind and namespace in {"", its_namespace} and _chosen(found, query)
        ]
        metadata = {"resourceVersion": str(self._version)}
        first = int(query.get("continue", "0"))
        end = first + int(query.get("limit", len(items)))
        if end < len(items):
            metadata["continue"] = str(end)
        return web.json_response({"items": items[first:end], "metadata": metadata})

    def _change(
        self, method: str, kind: str, namespace: str, name: str, raw: bytes
    ) -> web.Response:
        body = json.loads(raw) if raw else {}
        if method == "POST":
            return self._create(kind, namespace, body)
        if method == "PUT" and self.before_put is not None:
            self.before_put()
        before = self._objects.get((kind, namespace, name))
        if before is None:
            return _refused(404, "NotFound", f"{kind} {name} not found")
        if method == "GET":
            return web.json_response(before)
        self.writes += 1
        if method == "DELETE":
            self._happened(kind, "DELETED", self._objects.pop((kind, namespace, name)))
            return web.json_response({"status": "Success"})
        if method == "PUT":
            if body["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]:
                return _refused(409, "Conflict", f"{name} has been modified")
            body["metadata"]["creationTimestamp"] = before["metadata"]["creationTimestamp"]
            return web.json_response(self._set(kind, namespace, body))
        return web.json_response(self._set(kind, namespace, _merged(before, body)))

    def _create(self, kind: str, namespace: str, body: Json) -> web.Response:
        name = body["metadata"]["name"]
        if not _NAME.fullmatch(name):
            return _refused(422, "Invalid", f"{kind} {name!r} is invalid")
        if (kind, namespace, name) in self._objects:
            return _refused(409, "AlreadyExists", f"{kind} {name} already exists")
        self.writes += 1
        return web.json_response(self._set(kind, namespace, body), status=201)

    async def _watch(self, request: web.Request, kind: str, namespace: str) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._watchers.add(task)
        answer = web.StreamResponse()
        try:
            await answer.prepare(request)
            await self._send_events(answer, request, kind, namespace)
        finally:
            self._watchers.discard(task)
        return answer

    async def _send_events(
        self, answer: web.StreamResponse, request: web.Request, kind: str, namespace: str
    ) -> None:
        seen = int(request.query["resourceVersion"])
        if seen < self._forgotten:
            await _send(answer, "ERROR", {"code": 410, "message": "too old resource version"})
            return
        while True:
            for event in [one for one in self._events if one.version > seen]:
                seen = event.version
                theirs = event.object["metadata"]["namespace"]
                wanted = event.kind == kind and namespace in {"", theirs}
                if wanted and _chosen(event.object, request.query):
                    await _send(answer, event.type, event.object)
            async with self._changed:
                await self._changed.wait_for(lambda: self._version > seen)  # noqa: B023


async def _send(answer: web.StreamResponse, type_: str, found: Json) -> None:
    await answer.write(json.dumps({"type": type_, "object": found}).encode() + b"\n")


def _chosen(found: Json, query: Mapping[str, str]) -> bool:
    labels = found["metadata"].get("labels", {})
    wanted = [part for part in query.get("labelSelector", "").split(",") if part]
    return all(
        (labels.get(key) == value) if equals else key in labels
        for key, equals, value in (part.partition("=") for part in wanted)
    )


def _merged(before: Json, patch: Json) -> Json:
    found = deepcopy(before)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            found[key] = _merged(found.get(key) or {}, value)
        else:
            found[key] = value
    return found


def _refused(status: int, reason: str, message: str) -> web.Response:
    return web.json_response({"reason": reason, "message": message}, status=status)
