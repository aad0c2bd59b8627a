"""What a container is: its release as it is stored, and bodies of requests. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gateway_ext.errors import BadDeployment
from gateway_ext.model import Deployment
from gateway_ext.openfaas import function_options, quantities
from gateway_ext.providers.docker.engine import FUNCTION, RELEASE, EngineImage
from gateway_ext.providers.function_environment import container_environment, socket_folder
from gateway_ext.settings import GatewaySettings

SECRETS = "/var/openfaas/secrets"
_IMAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*(:\d+)?(/[a-zA-Z0-9][a-zA-Z0-9._-]*)*(:[\w.-]+)?"
                    r"(@sha256:[0-9a-f]{64})?", re.ASCII)  # fmt: skip
# The Engine, and the kernel below it, accept no less and no more.
_LEAST_MEMORY_BYTES = 6 << 20
_LEAST_CORES = 0.01
_LEAST_SHARES, _MOST_SHARES = 2, 262_144
_SHARES_OF_A_CORE = 1024
_MOST_LABELS_BYTES = 64 << 10  # the Engine repeats them in every answer about a container
# /tmp where the root is read-only: in memory, for the temporary files of a handler.
_TMP = f"rw,nosuid,nodev,mode=1777,size={256 << 20}"
# Processes and threads of one container: far above what functions use, far below the machine's.
_MOST_PROCESSES = 4096
_NANOS = 1_000_000_000


def check(deployment: Deployment) -> None:
    """BadDeployment if no container can be made of it."""
    if not _IMAGE.fullmatch(deployment.image):
        raise BadDeployment(f"image: {deployment.image!r} is no name of an image")
    labelled = sum(len(f"{name}{value}".encode()) for name, value in deployment.labels.items())
    if labelled > _MOST_LABELS_BYTES:
        raise BadDeployment(f"labels: {labelled} bytes; {_MOST_LABELS_BYTES} are the most")


def ignored(deployment: Deployment) -> list[str]:
    """Constraints that mean nothing on one machine."""
    return [one for one in deployment.constraints if not function_options.is_gpu_constraint(one)]


@dataclass(frozen=True, slots=True)
class Release:
    """A deployment with what all its containers share.

    `image` is the image that the name meant when it was resolved, None until it is on the Engine.
    `injected` is a digest of the injected variables: it differs when they would differ today.
    """

    id: str
    deployment: Deployment
    image: EngineImage | None
    injected: str

    @property
    def has_our_runtime(self) -> bool:
        return self.image is not None and self.image.has_our_template


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """A function as it is stored; `before` serves until `release` is ready."""

    release: Release
    before: Release | None
    folder: Path
    created_at: datetime
    wanted: int

    @property
    def deployment(self) -> Deployment:
        return self.release.deployment

    @property
    def releases(self) -> list[Release]:
        return [release for release in (self.before, self.release) if release is not None]


def container(
    release: Release,
    settings: GatewaySettings,
    labels: Mapping[str, str],
    injected: Mapping[str, str],
    secrets_volume: str,
    cores: int,
) -> dict[str, Any]:
    """The body that creates a container of this release, on an Engine with so many `cores`."""
    deployment = release.deployment
    assert release.image is not None, "containers are made once the image is there"
    return {
        "Image": release.image.id,
        "Env": [
            f"{name}={value}"
            for name, value in container_environment(deployment, injected, cores).items()
        ],
        "Labels": {
            **deployment.labels,
            **labels,
            FUNCTION: str(deployment.id),
            RELEASE: release.id,
            "com.gpufaas.image": deployment.image,
        },
        "HostConfig": {
            **_resources(deployment, cores),
            "NetworkMode": settings.docker_network,
            "RestartPolicy": {"Name": "no"},
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges:true"],
            "PidsLimit": _MOST_PROCESSES,
            "ReadonlyRootfs": deployment.read_only,
            "Tmpfs": {"/tmp": _TMP} if deployment.read_only else {},
            "Mounts": _mounts(settings, injected, secrets_volume),
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "8m", "max-file": "2"}},
        },
    }


def network(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """The body that creates a network whose containers reach the world but not each other."""
    isolated = {"com.docker.network.bridge.enable_icc": "false"}
    return {"Name": name, "Driver": "bridge", "Labels": dict(labels), "Options": isolated}


def filler(image: str, volume: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """The body that creates a container which never runs: a volume is filled through it."""
    mount = {"Type": "volume", "Source": volume, "Target": SECRETS}
    return {
        "Image": image,
        "Cmd": ["never"],
        "Labels": dict(labels),
        "HostConfig": {"NetworkMode": "none", "Mounts": [mount]},
    }


def _resources(deployment: Deployment, cores: int) -> dict[str, int]:
    """The nearest amounts that the Engine accepts: it lets no container have more `cores`."""
    limits, requests = deployment.limits, deployment.requests
    resources: dict[str, int] = {}
    if limits and limits.memory:
        size = max(quantities.memory_bytes(limits.memory), _LEAST_MEMORY_BYTES)
        resources |= {"Memory": size, "MemorySwap": size}  # the same: no swap
    if limits and limits.cpu:
        wanted = quantities.cpus(limits.cpu)
        resources["NanoCpus"] = round(min(max(wanted, _LEAST_CORES), cores) * _NANOS)
    if requests and requests.memory:
        size = max(quantities.memory_bytes(requests.memory), _LEAST_MEMORY_BYTES)
        resources["MemoryReservation"] = min(size, resources.get("Memory", size))
    if requests and requests.cpu:
        shares = round(quantities.cpus(requests.cpu) * _SHARES_OF_A_CORE)
        resources["CpuShares"] = min(max(shares, _LEAST_SHARES), _MOST_SHARES)
    return resources


def _mounts(
    settings: GatewaySettings, injected: Mapping[str, str], secrets_volume: str
) -> list[dict[str, Any]]:
    mounts = []
    if secrets_volume:
        mounts.append(_mount("volume", secrets_volume, SECRETS))
    if folder := socket_folder(injected):
        source = settings.docker_gpu_mount or folder
        mounts.append(_mount("bind" if source.startswith("/") else "volume", source, folder))
    return mounts


def _mount(kind: str, source: str, target: str) -> dict[str, Any]:
    return {"Type": kind, "Source": source, "Target": target, "ReadOnly": True}
