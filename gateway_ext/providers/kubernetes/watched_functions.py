"""The functions and pods that the watches have shown, what is told of them, and pods' logs."""

import asyncio
import contextlib
import heapq
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from common.time_limits import time_limit
from gateway_ext.errors import BadDeployment, ProviderFailed, UnknownFunction
from gateway_ext.model import Deployment, Endpoint, FunctionId, FunctionStatus, LogLine, Troubles
from gateway_ext.ports import FunctionListener, LogQuery
from gateway_ext.providers.http_api import ServerRefused
from gateway_ext.providers.kubernetes.client import ANSWER_S, ClusterClient, Json
from gateway_ext.providers.kubernetes.manifest import FUNCTION, LIFE, PORT, StoredFunction

log = logging.getLogger(__name__)

_Report = tuple[Deployment, tuple[Endpoint, ...], int, Troubles]


_STARTING = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True, slots=True)
class PodState:
    """One pod; `trouble` is the reason why it is not ready, or empty.

    If it `stays` so, the cluster pauses between its attempts: its image cannot be pulled, or its
    program ends again and again.
    """

    function: FunctionId
    life: str
    name: str
    address: str
    ready: bool
    started: bool
    trouble: str
    stays: bool = False


def pod_state(raw: Json) -> PodState:
    metadata, status = raw["metadata"], raw.get("status", {})
    leaving = "deletionTimestamp" in metadata or status.get("phase") in {"Succeeded", "Failed"}
    ready = _condition(status, "Ready").get("status") == "True"
    address = str(status.get("podIP", ""))
    labels = metadata["labels"]
    return PodState(
        function=FunctionId(str(metadata["namespace"]), str(labels[FUNCTION])),
        life=str(labels.get(LIFE, "")),
        name=str(metadata["name"]),
        address=f"[{address}]" if ":" in address else address,
        ready=ready and bool(address) and not leaving,
        started=any("containerID" in container for container in _containers(status)),
        trouble="" if ready or leaving else _trouble(status),
        stays=not (ready or leaving) and any(map(_is_put_off, _containers(status))),
    )


def _trouble(status: Json) -> str:
    for container in _containers(status):
        waiting = container.get("state", {}).get("waiting", {})
        ended = container.get("lastState", {}).get("terminated", {})
        if _is_put_off(container):
            return _joined(_joined(waiting.get("reason"), waiting.get("message")), _end(ended))
        if ended:
            return _end(ended)
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return _joined(scheduled.get("reason"), scheduled.get("message"))
    return ""


def _containers(status: Json) -> list[Json]:
    return status.get("containerStatuses") or []


def _is_put_off(container: Json) -> bool:
    waiting = container.get("state", {}).get("waiting", {})
    return bool(waiting) and waiting.get("reason") not in _STARTING


def _end(ended: Json) -> str:
    if not ended:
        return ""
    return f"it ended with status {ended.get('exitCode')} ({ended.get('reason', 'no reason')})"


def _joined(*parts: Any) -> str:
    return ": ".join(str(part) for part in parts if part)


def _condition(status: Json, kind: str) -> Json:
    for condition in status.get("conditions") or []:
        if condition.get("type") == kind:
            return dict(condition)
    return {}


class WatchedFunctions:
    """What this gateway knows of the cluster; changes arrive in the order of the watches."""

    def __init__(self) -> None:
        self._functions: dict[FunctionId, StoredFunction] = {}
        self._pods: defaultdict[FunctionId, dict[str, PodState]] = defaultdict(dict)
        self._reported: dict[FunctionId, _Report] = {}
        self._listener: FunctionListener | None = None
        self._changes: set[asyncio.Event] = set()

    def report_to(self, listener: FunctionListener) -> None:
        """Report all functions, and from now on every change."""
        self._listener = listener
        for function in sorted(self._functions):
            self._report(function)

    def function_changed(self, before: StoredFunction | None, now: StoredFunction | None) -> None:
        """A watch has shown a Deployment, or that it is gone."""
        if now is not None:
            self._functions[now.deployment.id] = now
            self._changed(now.deployment.id)
        elif before is not None:
            id_ = before.deployment.id
            stored = self._functions.get(id_)
            if stored is not None and stored.marks.life == before.marks.life:
                del self._functions[id_]
            self._changed(id_)

    def pod_changed(self, before: PodState | None, now: PodState | None) -> None:
        """A watch has shown a pod, or that it is gone."""
        shown = now or before
        assert shown is not None, "there is no change without an object"
        pods = self._pods[shown.function]
        if now is not None:
            pods[now.name] = now
        else:
            pods.pop(shown.name, None)
        if not pods:
            del self._pods[shown.function]
        self._changed(shown.function)

    def ids(self, namespace: str) -> list[FunctionId]:
        return sorted(function for function in self._functions if function.namespace == namespace)

    def found(self, function: FunctionId) -> StoredFunction | None:
        return self._functions.get(function)

    def all(self) -> Sequence[StoredFunction]:
        return [self._functions[function] for function in sorted(self._functions)]

    def pods(self, function: FunctionId) -> list[PodState]:
        """Pods of a function, by name; none of an earlier life of the name."""
        stored = self._functions.get(function)
        if stored is None:
            return []
        pods = self._pods.get(function, {})
        return [pods[name] for name in sorted(pods) if pods[name].life == stored.marks.life]

    def status(self, function: FunctionId) -> FunctionStatus:
        """UnknownFunction if there is none of that name."""
        stored = self._functions.get(function)
        if stored is None:
            raise UnknownFunction(function)
        pods = self.pods(function)
        return FunctionStatus(
            deployment=stored.deployment,
            replicas=stored.wanted,
            available_replicas=sum(pod.ready for pod in pods),
            created_at=stored.created_at,
            trouble=next((pod.trouble for pod in pods if pod.trouble), stored.trouble),
        )

    async def until(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Wait until the view is so; False after `within_s`."""
        changed = asyncio.Event()
        self._changes.add(changed)
        try:
            async with time_limit(within_s):
                while not holds():
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            return False
        finally:
            self._changes.discard(changed)
        return True

    def _changed(self, function: FunctionId) -> None:
        if self._listener is not None:
            self._report(function)
        for change in self._changes:
            change.set()

    def _report(self, function: FunctionId) -> None:
        assert self._listener is not None, "called only with a listener"
        stored = self._functions.get(function)
        if stored is None:
            if self._reported.pop(function, None) is not None:
                self._listener.function_gone(function)
            return
        troubles = Troubles(self._start_trouble(function, stored))
        now = (stored.deployment, self._endpoints(function), stored.wanted, troubles)
        if self._reported.get(function) == now:
            return
        self._reported[function] = now
        try:
            self._listener.function_is(now[0], now[1], wanted=now[2], troubles=now[3])
        except BadDeployment as error:
            log.warning("%s was deployed by another gateway, and not served: %s", function, error)

    def _start_trouble(self, function: FunctionId, stored: StoredFunction) -> str:
        """Why no pod need be waited for; empty while one of them starts."""
        pods = self.pods(function)
        if not pods:
            return stored.trouble
        return pods[0].trouble if all(pod.stays for pod in pods) else ""

    def _endpoints(self, function: FunctionId) -> tuple[Endpoint, ...]:
        return tuple(
            Endpoint(pod.name, f"tcp:{pod.address}:{PORT}")
            for pod in self.pods(function)
            if pod.ready
        )


_AGAIN_S = 1.0
_MOST_AHEAD = 4096  # lines that a reader may be behind before pods are read more slowly


class PodLogs:
    """Logs of the pods that there are: the cluster keeps none of a pod that is gone."""

    def __init__(self, client: ClusterClient, view: WatchedFunctions) -> None:
        self._client = client
        self._view = view

    async def read(self, query: LogQuery) -> AsyncGenerator[LogLine, None]:
        """Lines, oldest first; with `follow` also those of pods that come later."""
        present = self._pods(query)
        last: dict[str, datetime | None] = {pod.name: query.since for pod in present}
        newest: deque[LogLine] = deque(maxlen=_tail(query))
        async with contextlib.aclosing(self._in_order(present, query)) as lines:
            async for line in lines:
                last[line.instance] = line.at
                if newest.maxlen is None:
                    yield line
                else:
                    newest.append(line)
        for line in newest:
            yield line
        if query.follow:
            async with contextlib.aclosing(self._followed(query, last)) as coming:
                async for line in coming:
                    yield line

    async def _in_order(
        self, pods: Sequence[PodState], query: LogQuery
    ) -> AsyncGenerator[LogLine, None]:
        """Of each pod one line is kept here at a time."""
        async with contextlib.AsyncExitStack() as open_logs:
            heads: list[tuple[datetime, int, LogLine, AsyncGenerator[LogLine, None]]] = []
            for number, pod in enumerate(pods):
                lines = self._lines(pod, query, query.since)
                await open_logs.enter_async_context(contextlib.aclosing(lines))
                if (line := await anext(lines, None)) is not None:
                    heapq.heappush(heads, (line.at, number, line, lines))
            while heads:
                _, number, line, lines = heads[0]
                yield line
                if (line := await anext(lines, None)) is not None:
                    heapq.heapreplace(heads, (line.at, number, line, lines))
                else:
                    heapq.heappop(heads)

    async def _followed(
        self, query: LogQuery, last: dict[str, datetime | None]
    ) -> AsyncGenerator[LogLine, None]:
        """New lines of all pods; of a pod in `last` those after that time."""
        lines: asyncio.Queue[LogLine] = asyncio.Queue(_MOST_AHEAD)
        following = asyncio.create_task(self._follow_all(query, last, lines))
        reading = asyncio.create_task(lines.get())
        try:
            while True:
                await asyncio.wait([reading, following], return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    following.result()  # the function was removed, or following it failed
                    return
                line, reading = reading.result(), asyncio.create_task(lines.get())
                yield line
        finally:
            for task in (following, reading):
                task.cancel()
            await asyncio.gather(following, reading, return_exceptions=True)

    async def _follow_all(
        self, query: LogQuery, last: dict[str, datetime | None], into: asyncio.Queue[LogLine]
    ) -> None:
        """Follow each pod that is or comes, until the function is removed."""
        async with asyncio.TaskGroup() as group:
            followed: set[str] = set()
            while self._view.found(query.function) is not None:
                for pod in self._pods(query):
                    if pod.name not in followed:
                        followed.add(pod.name)
                        group.create_task(self._follow(pod, query, last.get(pod.name), into))
                await self._view.until(lambda: self._has_news(query, followed), _AGAIN_S)

    async def _follow(
        self, pod: PodState, query: LogQuery, since: datetime | None, into: asyncio.Queue[LogLine]
    ) -> None:
        """Lines of one pod, also of a container that replaces its first one."""
        while pod.name in {each.name for each in self._pods(query)}:
            before = since  # lines of one write may have one time: all but those before are new
            try:
                async for line in self._lines(pod, query, before, follow=True):
                    if before is None or line.at > before:
                        since = line.at
                        await into.put(line)
            except ProviderFailed as error:
                log.warning("the log of %s breaks off: %s", pod.name, error)
            await asyncio.sleep(_AGAIN_S)

    def _has_news(self, query: LogQuery, followed: set[str]) -> bool:
        gone = self._view.found(query.function) is None
        return gone or any(pod.name not in followed for pod in self._pods(query))

    def _pods(self, query: LogQuery) -> list[PodState]:
        return [
            pod
            for pod in self._view.pods(query.function)
            if pod.started and query.instance in {"", pod.name}
        ]

    async def _lines(
        self, pod: PodState, query: LogQuery, since: datetime | None, *, follow: bool = False
    ) -> AsyncGenerator[LogLine, None]:
        wanted = {"timestamps": "true"}
        if since is not None:
            wanted["sinceTime"] = since.astimezone().isoformat(timespec="seconds")
        tail = _tail(query)
        if follow:
            wanted["follow"] = "true"
        elif tail is not None:
            wanted["tailLines"] = str(max(1, tail))  # the last one says where following begins
        path = f"/api/v1/namespaces/{pod.function.namespace}/pods/{pod.name}/log"
        try:
            quiet_s = None if follow else ANSWER_S
            async with contextlib.aclosing(self._client.lines(path, wanted, quiet_s)) as lines:
                async for raw in lines:
                    line = _line(pod, raw)
                    if line is not None and (since is None or line.at >= since):
                        yield line
        except ServerRefused as refused:  # its container has not started, or it has just ended
            log.debug("no log of %s: %s", pod.name, refused)


def _tail(query: LogQuery) -> int | None:
    """How many of the newest lines are wanted; None if all are."""
    return query.tail if query.tail is not None and query.tail >= 0 else None


def _line(pod: PodState, raw: bytes) -> LogLine | None:
    at, _, text = raw.decode(errors="replace").partition(" ")
    try:
        return LogLine(pod.function, pod.name, datetime.fromisoformat(at), text)
    except ValueError:
        return None  # the kubelet's own word about a container that is gone
