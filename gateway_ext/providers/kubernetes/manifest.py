"""What a function is in the cluster: its Deployment as it is sent, and as it is read. Pure."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from gateway_ext.errors import BadDeployment, BadRequest
from gateway_ext.model import Deployment, FunctionId, Resources
from gateway_ext.openfaas import function_options, quantities
from gateway_ext.providers.function_environment import (
    container_environment,
    injected_digest,
    socket_folder,
)
from gateway_ext.providers.kubernetes.client import Json
from gateway_ext.settings import GatewaySettings

FUNCTION, GATEWAY, LIFE = "faas_function", "com.gpufaas.gateway", "com.gpufaas.life"
_STORED, _INJECTED = "com.gpufaas.deployment", "com.gpufaas.injected"
_RELEASE = "com.gpufaas.release"
_READY_PATH = "com.openfaas.ready.http.path"
_SECRETS = "/var/openfaas/secrets"
PORT = 8080  # at which every instance is called
_LEAVE_S = 3  # how long an instance that is to end takes calls, until all gateways know of it
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_CONSTRAINT = re.compile(r"\s*([^\s=!]+)\s*==?\s*([^\s=]+)\s*")


class ReleaseMarks(NamedTuple):
    """Tells lives of a name and deployments within a life apart.

    A pod of an earlier life of the name is none of this function; each release replaces all pods.
    """

    life: str
    release: str


@dataclass(frozen=True, slots=True)
class StoredFunction:
    """A function as the cluster keeps it; `trouble` is why it takes no pod of it, or empty."""

    deployment: Deployment
    wanted: int
    created_at: datetime
    marks: ReleaseMarks
    injected: str
    trouble: str


def check(deployment: Deployment) -> None:
    """BadDeployment if no Deployment of a cluster can be made of it."""
    if not _NAME.fullmatch(deployment.id.name):
        raise BadDeployment(
            f"{deployment.id.name!r}: a name of lower case letters, digits and - is expected"
        )
    _resources(deployment)
    _node_selector(deployment)


def further_gpu_fields(settings: GatewaySettings) -> Mapping[str, Any]:
    """Fields that a setting adds to the pods of GPU functions, such as `nodeSelector`."""
    try:
        fields = json.loads(settings.kubernetes_gpu_pod or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"kubernetes_gpu_pod is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("kubernetes_gpu_pod: a JSON object is expected")
    return fields


def manifest(
    deployment: Deployment,
    settings: GatewaySettings,
    injected: Mapping[str, str],
    marks: ReleaseMarks,
    replicas: int,
) -> Json:
    chosen = {FUNCTION: deployment.id.name, GATEWAY: settings.kubernetes_name, LIFE: marks.life}
    labels = {**deployment.labels, **chosen}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": deployment.id.name,
            "namespace": deployment.id.namespace,
            "labels": labels,
            "annotations": {
                **deployment.annotations,
                _STORED: msgspec.json.encode(deployment, enc_hook=dict).decode(),
                _INJECTED: injected_digest(injected),
                _RELEASE: marks.release,
            },
        },
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": chosen},
            "revisionHistoryLimit": 1,
            # A new instance is ready before an old one is asked to end.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "template": {
                "metadata": {
                    "labels": labels,
                    "annotations": {**deployment.annotations, _RELEASE: marks.release},
                },
                "spec": _pod(deployment, settings, injected),
            },
        },
    }


def stored_function(raw: Json) -> StoredFunction | None:
    """The inverse of `manifest`; None if somebody else has changed what was stored in it."""
    try:
        metadata, spec = raw["metadata"], raw["spec"]
        annotations, labels = metadata["annotations"], metadata["labels"]
        deployment = msgspec.json.decode(annotations[_STORED], type=Deployment)
        if deployment.id != FunctionId(str(metadata["namespace"]), str(metadata["name"])):
            return None  # a copy under another name
        return StoredFunction(
            deployment=deployment,
            wanted=int(spec["replicas"]),
            created_at=datetime.fromisoformat(metadata["creationTimestamp"]),
            marks=ReleaseMarks(str(labels[LIFE]), str(annotations[_RELEASE])),
            injected=str(annotations[_INJECTED]),
            trouble=_refused_pods(raw),
        )
    except (*_DAMAGE, msgspec.DecodeError):
        return None


def _refused_pods(raw: Json) -> str:
    """Why the cluster takes no pod of it, as when a quota is used up."""
    for condition in raw.get("status", {}).get("conditions") or []:
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return str(condition.get("message", ""))
    return ""


def _pod(
    deployment: Deployment, settings: GatewaySettings, injected: Mapping[str, str]
) -> dict[str, Any]:
    options = function_options.of(deployment)
    further = dict(further_gpu_fields(settings)) if injected else {}
    mounts, volumes = _volumes(deployment, injected)
    spec = {
        **further,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        # A call may take as long after the instance was asked to end.
        "terminationGracePeriodSeconds": math.ceil(options.timeout_s) + _LEAVE_S + 1,
        "containers": [_container(deployment, settings, injected, mounts)],
        "volumes": volumes,
    }
    if settings.kubernetes_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.kubernetes_pull_secrets]
    if chosen := {**(further.get("nodeSelector") or {}), **_node_selector(deployment)}:
        spec["nodeSelector"] = chosen
    return spec


def _container(
    deployment: Deployment,
    settings: GatewaySettings,
    injected: Mapping[str, str],
    mounts: list[Json],
) -> Json:
    variables = container_environment(deployment, injected)
    return {
        "name": deployment.id.name,
        "image": deployment.image,
        "imagePullPolicy": settings.kubernetes_pull,
        # The kubelet would put other variables in the place of $(NAME), and one $ in that of two.
        "env": [
            {"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": _resources(deployment),
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": deployment.read_only,
        },
        # Gateways hear that it is to end, and send it no more, before it is asked to.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_LEAVE_S)]}}},
        **_probes(deployment),
    }


def _probes(deployment: Deployment) -> Json:
    """Of an image of our template its runtime is asked; of another one an open port is enough."""
    ours = function_options.GPU_FLAG in deployment.process.split()
    path = "/_/ready" if ours else deployment.annotations.get(_READY_PATH, "")
    asked: Json = {"tcpSocket": {"port": PORT}}
    if path:
        asked = {"httpGet": {"path": path, "port": PORT}}
    probes = {
        "readinessProbe": {**asked, "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 3}
    }
    if ours:
        health = {"httpGet": {"path": "/_/health", "port": PORT}}
        probes["livenessProbe"] = {
            **health,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        }
    return probes


def _volumes(deployment: Deployment, injected: Mapping[str, str]) -> tuple[list[Json], list[Json]]:
    mounts: list[Json] = []
    volumes: list[Json] = []
    if deployment.secrets:
        sources = [
            {"secret": {"name": name, "items": [{"key": name, "path": name}]}}
            for name in deployment.secrets
        ]
        volumes.append({"name": "secrets", "projected": {"sources": sources}})
        mounts.append({"name": "secrets", "mountPath": _SECRETS, "readOnly": True})
    if deployment.read_only:
        volumes.append({"name": "tmp", "emptyDir": {}})
        mounts.append({"name": "tmp", "mountPath": "/tmp"})
    if folder := socket_folder(injected):
        volumes.append({"name": "gpus", "hostPath": {"path": folder, "type": "Directory"}})
        mounts.append({"name": "gpus", "mountPath": folder, "readOnly": True})
    return mounts, volumes


def _resources(deployment: Deployment) -> Json:
    """Without GPUs, which GPU managers share out."""
    resources = {}
    for key, amounts in (("limits", deployment.limits), ("requests", deployment.requests)):
        if read := _amounts(key, amounts):
            resources[key] = read
    return resources


def _amounts(key: str, amounts: Resources | None) -> dict[str, str]:
    texts: dict[str, str] = {}
    if amounts is None:
        return texts
    try:
        if amounts.memory:
            texts["memory"] = str(quantities.memory_bytes(amounts.memory))
        if amounts.cpu:
            texts["cpu"] = f"{max(1, round(quantities.cpus(amounts.cpu) * 1000))}m"
    except ValueError as error:
        raise BadDeployment(f"{key}: {error}") from error
    return texts


def _node_selector(deployment: Deployment) -> dict[str, str]:
    """Constraints about GPUs are left out: they are for GPU managers' nodes."""
    labels = {}
    for constraint in deployment.constraints:
        if function_options.is_gpu_constraint(constraint):
            continue
        match = _CONSTRAINT.fullmatch(constraint)
        if match is None:
            raise BadDeployment(f"constraint {constraint!r}: LABEL=VALUE is expected")
        labels[match[1]] = match[2]
    return labels
