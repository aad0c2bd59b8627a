"""Deployments as they are kept in files."""

from dataclasses import asdict, replace
from typing import Any

from gateway_ext.model import Deployment, FunctionId, Resources


def written(deployment: Deployment) -> dict[str, Any]:
    """As JSON can say it."""
    plain = replace(
        deployment,
        environment=dict(deployment.environment),
        labels=dict(deployment.labels),
        annotations=dict(deployment.annotations),
    )
    return asdict(plain) | {"id": list(deployment.id)}


def read(said: dict[str, Any]) -> Deployment:
    """What was written."""
    for key in ("limits", "requests"):
        said[key] = None if said[key] is None else Resources(**said[key])
    for key in ("constraints", "secrets"):
        said[key] = tuple(said[key])
    return Deployment(**said | {"id": FunctionId(*said["id"])})
