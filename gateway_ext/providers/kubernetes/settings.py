"""The settings of the Kubernetes provider: one frozen value."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway_ext.errors import BadRequest

_LABEL_VALUE = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?")
_PULLS = frozenset({"Always", "IfNotPresent", "Never"})


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """Which cluster to use, and how functions run there.

    `credentials` is a folder with `token`, which is read again as it changes, and `ca.crt`.
    Everything that belongs to this gateway is labelled with `name`. Without `namespaces` those
    of the cluster that carry the label are used, and can be made and removed. `gpu_pod` has further
    fields of the pods of GPU functions. `leave_s` is how long an instance that is to end still
    takes calls, until every gateway has heard of it.
    """

    url: str = "https://kubernetes.default.svc"
    credentials: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    name: str = "gpufaas"
    namespaces: tuple[str, ...] = ("openfaas-fn",)
    pull: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    gpu_pod: str = ""
    leave_s: int = 3
    port: int = 8080

    def check(self) -> None:
        """BadRequest names the value that is not allowed."""
        try:
            parts = urlsplit(self.url)
        except ValueError as error:
            raise BadRequest(f"kubernetes_url: {self.url!r}: {error}") from error
        if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path.strip("/"):
            raise BadRequest(f"kubernetes_url: {self.url!r}: https://HOST:PORT is expected")
        if not _LABEL_VALUE.fullmatch(self.name):
            raise BadRequest(f"kubernetes_name: {self.name!r} is no value of a label")
        if self.pull not in _PULLS:
            expected = ", ".join(sorted(_PULLS))
            raise BadRequest(f"kubernetes_pull: {self.pull!r}: {expected} is expected")
        self.further_gpu_fields()

    def further_gpu_fields(self) -> Mapping[str, Any]:
        """Further fields of the pods of GPU functions, such as `nodeSelector`."""
        try:
            fields = json.loads(self.gpu_pod or "{}")
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"kubernetes_gpu_pod is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise BadRequest("kubernetes_gpu_pod: a JSON object is expected")
        return fields
