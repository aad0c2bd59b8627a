"""The functions and pods that the watches have shown, and what the listener is told of them."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.time_limits import time_limit
from gateway_ext.errors import BadDeployment, UnknownFunction
from gateway_ext.model import Deployment, Endpoint, FunctionId, FunctionStatus, Troubles
from gateway_ext.ports import FunctionListener
from gateway_ext.providers.kubernetes.client import Json
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
