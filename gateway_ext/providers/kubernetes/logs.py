"""Reads what the pods of a function have written, and follows it."""

import asyncio
import contextlib
import heapq
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime

from gateway_ext.errors import ProviderFailed
from gateway_ext.model import LogLine
from gateway_ext.ports import LogQuery
from gateway_ext.providers.kubernetes.client import (
    ANSWER_S,
    ClusterClient,
    ClusterRefused,
)
from gateway_ext.providers.kubernetes.watched_functions import PodState, WatchedFunctions

log = logging.getLogger(__name__)

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
        self,
        pod: PodState,
        query: LogQuery,
        since: datetime | None,
        into: asyncio.Queue[LogLine],
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
        except ClusterRefused as refused:  # its container has not started, or it has just ended
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
