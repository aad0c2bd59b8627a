"""What the cluster says of one pod of a function. Pure."""

from dataclasses import dataclass
from typing import Any

from gateway_ext.model import FunctionId
from gateway_ext.providers.kubernetes.cluster_client import Json
from gateway_ext.providers.kubernetes.function_manifest import FUNCTION, LIFE

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


def pod_state(found: Json) -> PodState:
    """The state in a pod's object."""
    metadata, status = found["metadata"], found.get("status", {})
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
        started=any("containerID" in each for each in _containers(status)),
        trouble="" if ready or leaving else _trouble(status),
        stays=not (ready or leaving) and any(map(_is_put_off, _containers(status))),
    )


def _trouble(status: Json) -> str:
    for each in _containers(status):
        waiting = each.get("state", {}).get("waiting", {})
        ended = each.get("lastState", {}).get("terminated", {})
        if _is_put_off(each):
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
    for each in status.get("conditions") or []:
        if each.get("type") == kind:
            return dict(each)
    return {}
