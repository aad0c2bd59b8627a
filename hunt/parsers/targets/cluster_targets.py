"""What a Kubernetes API server passes on: objects that others may change, and pods' output."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway_ext.errors import BadRequest, ProviderFailed
from gateway_ext.model import Deployment, FunctionId
from gateway_ext.providers.kubernetes import client, manifest, watched_functions
from gateway_ext.providers.kubernetes.client import ClusterClient, ObjectWatch
from gateway_ext.providers.kubernetes.manifest import (
    FUNCTION,
    LIFE,
    ReleaseMarks,
    stored_function,
)
from gateway_ext.providers.kubernetes.provider import check_settings
from gateway_ext.providers.kubernetes.watched_functions import PodState, WatchedFunctions, pod_state
from gateway_ext.settings import GatewaySettings
from hunt.parsers.parser_target import InputForm, Target

_ROOM = "gateway_ext/providers/kubernetes"
_CLUSTER = "the cluster's API server, and who may change objects there"
_LINE_BOUND = "8 MiB a line"
_FUNCTION = FunctionId("openfaas-fn", "f")
_CLIENT = ClusterClient("https://cluster", Path("/credentials"))
_POD = {
    "metadata": {
        "uid": "u",
        "resourceVersion": "8",
        "namespace": "openfaas-fn",
        "name": "f-1",
        "labels": {FUNCTION: "f", LIFE: "life"},
    },
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [
            {
                "containerID": "c",
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "m"}},
                "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}},
            }
        ],
    },
}


def targets() -> list[Target]:
    """All of this file."""
    return [
        Target(
            "cluster-functions", _event(_functions), (ProviderFailed,),
            lambda: [_as_event(_stored())], InputForm.JSON,
            (f"{_ROOM}/client.py", f"{_ROOM}/manifest.py"), _CLUSTER, _LINE_BOUND,
        ),
        Target(
            "cluster-pods", _event(_pods), (ProviderFailed,),
            lambda: [_as_event(_POD)], InputForm.JSON,
            (f"{_ROOM}/watched_functions.py",), _CLUSTER, _LINE_BOUND,
        ),
        Target(
            "cluster-refusal", lambda data: client._refusal(403, data), (),  # noqa: SLF001 - its caller needs a server
            lambda: [b'{"reason": "Forbidden", "message": "no"}'], InputForm.JSON,
            (f"{_ROOM}/client.py",), _CLUSTER, "1 MiB",
        ),
        Target(
            "cluster-log-line", lambda data: watched_functions._line(pod_state(_POD), data), (),  # noqa: SLF001 - as above
            lambda: [b"2026-01-02T03:04:05.123456789Z a line"], InputForm.TEXT,
            (f"{_ROOM}/watched_functions.py",), "functions, by their output", _LINE_BOUND,
        ),
        Target(
            "cluster-settings", _settings, (BadRequest,),
            lambda: [b'https://[::1]:6443\n{"nodeSelector": {"gpu": "yes"}}'], InputForm.TEXT,
            (f"{_ROOM}/provider.py",), "people", "a value of the settings",
        ),
    ]  # fmt: skip


def _stored() -> dict[str, Any]:
    deployment, marks = Deployment(_FUNCTION, "image"), ReleaseMarks("life", "release")
    found = manifest.manifest(deployment, GatewaySettings(), {}, marks, 1)
    found["metadata"] |= {
        "uid": "u",
        "resourceVersion": "7",
        "creationTimestamp": "2026-01-02T03:04:05Z",
    }
    found["status"] = {
        "conditions": [{"type": "ReplicaFailure", "status": "True", "message": "quota"}]
    }
    return found


def _as_event(found: dict[str, Any]) -> bytes:
    return json.dumps({"type": "MODIFIED", "object": found}).encode()


def _event(watch: Callable[[WatchedFunctions], ObjectWatch[Any]]) -> Callable[[bytes], Any]:
    """Takes one line of a watch, as the gateway does, and asks for what it then knows."""

    def take(data: bytes) -> Any:
        view = WatchedFunctions()
        watch(view)._take(_CLIENT.object_of(data))  # noqa: SLF001 - as above
        return [view.status(each.deployment.id) for each in view.all()]

    return take


def _functions(view: WatchedFunctions) -> ObjectWatch[Any]:
    return ObjectWatch(_CLIENT, "/functions", "", stored_function, view.function_changed)


def _pods(view: WatchedFunctions) -> ObjectWatch[PodState]:
    return ObjectWatch(_CLIENT, "/pods", "", pod_state, view.pod_changed)


def _settings(data: bytes) -> None:
    url, _, gpu_pod = data.decode(errors="surrogateescape").partition("\n")
    check_settings(GatewaySettings(kubernetes_url=url, kubernetes_gpu_pod=gpu_pod))
