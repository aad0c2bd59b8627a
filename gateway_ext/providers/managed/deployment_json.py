"""Deployments as JSON objects in files."""

from dataclasses import asdict, replace
from typing import Any

from gateway_ext.model import Deployment, FunctionId, Resources


def written(deployment: Deployment) -> dict[str, Any]:
    """The deployment as a JSON object."""
    plain = replace(
        deployment,
        environment=dict(deployment.environment),
        labels=dict(deployment.labels),
        annotations=dict(deployment.annotations),
    )
    return asdict(plain) | {"id": list(deployment.id)}


def read(found: dict[str, Any]) -> Deployment:
    """The inverse of `written`."""
    for key in ("limits", "requests"):
        found[key] = None if found[key] is None else Resources(**found[key])
    for key in ("constraints", "secrets"):
        found[key] = tuple(found[key])
    return Deployment(**found | {"id": FunctionId(*found["id"])})
