"""What a function's container is to be, as the Engine is told. Pure."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from gateway_ext import quantities, wishes
from gateway_ext.errors import BadDeployment
from gateway_ext.model import Deployment
from gateway_ext.providers.docker.engine import FUNCTION, RELEASE
from gateway_ext.providers.docker.settings import DockerSettings
from gateway_ext.providers.docker.store import Release

SECRETS = "/var/openfaas/secrets"
_IMAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*(:\d+)?(/[a-zA-Z0-9][a-zA-Z0-9._-]*)*(:[\w.-]+)?"
                    r"(@sha256:[0-9a-f]{64})?")  # fmt: skip
_LEAST_MEMORY_BYTES = 6 << 20  # the Engine takes no less
_SHARES_OF_A_CORE = 1024
_MOST_LABELS_BYTES = 64 << 10  # they are in all that the Engine says of a container
_TMP = "rw,nosuid,nodev,mode=1777,size={}"
_NANOS = 1_000_000_000
# Of what is injected, what a running container must have as it would be given today. The path of
# the shim is this machine's: images have their own.
_SHIM_PATH = "PYTHONPATH"
_LASTING = ("GPUFAAS_ENABLED", "GPUFAAS_ADDRESS", "GPUFAAS_CREDENTIAL")


def check(deployment: Deployment) -> None:
    """BadDeployment where no container can be made of it."""
    if not _IMAGE.fullmatch(deployment.image):
        raise BadDeployment(f"image: {deployment.image!r} is no name of an image")
    for name in deployment.environment:
        if not name or "=" in name or "\0" in name:
            raise BadDeployment(f"{name!r} is no name of a variable")
    labelled = sum(len(f"{name}{value}".encode()) for name, value in deployment.labels.items())
    if labelled > _MOST_LABELS_BYTES:
        raise BadDeployment(f"labels: {labelled} bytes; {_MOST_LABELS_BYTES} are the most")
    _resources(deployment)


def ignored(deployment: Deployment) -> list[str]:
    """Constraints that one machine cannot mean anything by."""
    return [one for one in deployment.constraints if not wishes.is_gpu_constraint(one)]


def lasting(injected: Mapping[str, str]) -> str:
    """Names what is injected without telling it."""
    said = [(name, injected[name]) for name in _LASTING if name in injected]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16] if said else ""


def container(
    release: Release,
    settings: DockerSettings,
    labels: Mapping[str, str],
    injected: Mapping[str, str],
    secrets_volume: str,
) -> dict[str, Any]:
    """The body of its creation."""
    deployment = release.deployment
    assert release.image is not None, "made once it is there"
    return {
        "Image": release.image.id,
        "Env": [f"{name}={value}" for name, value in _environment(deployment, injected).items()],
        "Labels": {
            **deployment.labels,
            **labels,
            FUNCTION: str(deployment.id),
            RELEASE: release.id,
            "com.gpufaas.image": deployment.image,
        },
        "HostConfig": {
            **_resources(deployment),
            "NetworkMode": settings.network,
            "RestartPolicy": {"Name": "no"},
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges:true"],
            "PidsLimit": settings.pids,
            "ReadonlyRootfs": deployment.read_only,
            "Tmpfs": {"/tmp": _TMP.format(settings.tmp_bytes)} if deployment.read_only else {},
            "Mounts": _mounts(settings, injected, secrets_volume),
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "8m", "max-file": "2"}},
        },
    }


def network(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """One in which functions reach the world, and not each other."""
    alone = {"com.docker.network.bridge.enable_icc": "false"}
    return {"Name": name, "Driver": "bridge", "Labels": dict(labels), "Options": alone}


def filler(image: str, volume: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """A container that never runs: through it a volume is written."""
    mount = {"Type": "volume", "Source": volume, "Target": SECRETS}
    return {
        "Image": image,
        "Cmd": ["never"],
        "Labels": dict(labels),
        "HostConfig": {"NetworkMode": "none", "Mounts": [mount]},
    }


def _environment(deployment: Deployment, injected: Mapping[str, str]) -> dict[str, str]:
    wished = wishes.of(deployment)
    limits = deployment.limits
    cores = math.ceil(quantities.cpus(limits.cpu)) if limits and limits.cpu else None
    defaults = {
        # The gateway answers at its time; a second later the runtime gives the call up as well.
        "exec_timeout": str(math.ceil(wished.timeout_s) + 1),
        **({"fprocess": deployment.process} if deployment.process else {}),
        **({"GPUFAAS_THREADS": str(wished.concurrency)} if wished.concurrency else {}),
        **({"OMP_NUM_THREADS": str(cores)} if cores else {}),
    }
    ours = {name: value for name, value in injected.items() if name != _SHIM_PATH}
    return {**defaults, **deployment.environment, "GPUFAAS_WORKERS": str(wished.workers), **ours}


def _resources(deployment: Deployment) -> dict[str, int]:
    limits, requests = deployment.limits, deployment.requests
    found: dict[str, int] = {}
    if limits and limits.memory:
        size = _read("limits.memory", limits.memory, quantities.memory_bytes)
        if size < _LEAST_MEMORY_BYTES:
            raise BadDeployment(f"limits.memory: {limits.memory!r}: 6Mi is the least")
        found |= {"Memory": round(size), "MemorySwap": round(size)}  # that is: no swap
    if limits and limits.cpu:
        found["NanoCpus"] = round(_read("limits.cpu", limits.cpu, quantities.cpus) * _NANOS)
    if requests and requests.memory:
        size = _read("requests.memory", requests.memory, quantities.memory_bytes)
        found["MemoryReservation"] = min(round(size), found.get("Memory", round(size)))
    if requests and requests.cpu:
        cores = _read("requests.cpu", requests.cpu, quantities.cpus)
        found["CpuShares"] = max(2, round(cores * _SHARES_OF_A_CORE))
    return found


def _read(key: str, text: str, read: Any) -> float:
    try:
        return float(read(text))
    except ValueError as error:
        raise BadDeployment(f"{key}: {text!r}: {error}") from error


def _mounts(
    settings: DockerSettings, injected: Mapping[str, str], secrets_volume: str
) -> list[dict[str, Any]]:
    found = []
    if secrets_volume:
        found.append(_mount("volume", secrets_volume, SECRETS))
    kind, _, path = injected.get("GPUFAAS_ADDRESS", "").partition(":")
    if kind == "unix" and path.startswith("/"):
        # The folder and not the socket: a new GPU manager makes a new one.
        folder = str(PurePosixPath(path).parent)
        source = settings.gpu_mount or folder
        found.append(_mount("bind" if source.startswith("/") else "volume", source, folder))
    return found


def _mount(kind: str, source: str, target: str) -> dict[str, Any]:
    return {"Type": kind, "Source": source, "Target": target, "ReadOnly": True}
