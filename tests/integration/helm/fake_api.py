"""As much of a Kubernetes API as helm asks before it installs: its kinds, and what is there."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.kit.engines.kubernetes.helm import KUBERNETES, Document

# Kinds that the chart makes, by group and version, each with the name in its path.
KINDS = {
    "v1": {
        "ConfigMap": "configmaps",
        "Pod": "pods",
        "Secret": "secrets",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
    },
    "apps/v1": {"DaemonSet": "daemonsets", "StatefulSet": "statefulsets"},
    "monitoring.coreos.com/v1": {
        "PrometheusRule": "prometheusrules",
        "ServiceMonitor": "servicemonitors",
    },
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "rbac.authorization.k8s.io/v1": {
        "ClusterRole": "clusterroles",
        "ClusterRoleBinding": "clusterrolebindings",
        "Role": "roles",
        "RoleBinding": "rolebindings",
    },
}


@contextmanager
def cluster(there: Sequence[Document], folder: Path) -> Iterator[Path]:
    """A cluster in which these documents are; the path of a kubeconfig that leads to it."""
    answers = dict(_discovery())
    answers |= {_path(document): document for document in there}
    server = ThreadingHTTPServer(("127.0.0.1", 0), _answering(answers))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    config = folder / "kubeconfig"
    config.write_text(yaml.safe_dump(_kubeconfig(f"http://127.0.0.1:{server.server_port}")))
    config.chmod(0o600)
    try:
        yield config
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answering(answers: dict[str, Document]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(urlsplit(self.path).path)
            missing = {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}
            body = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
            """Nobody reads it."""

    return Handler


def _discovery() -> Iterator[tuple[str, Document]]:
    major, minor, _ = KUBERNETES.split(".")
    yield "/version", {"major": major, "minor": minor, "gitVersion": f"v{KUBERNETES}"}
    yield "/api", {"kind": "APIVersions", "versions": ["v1"]}
    groups = [version for version in KINDS if "/" in version]
    yield (
        "/apis",
        {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(one) for one in groups]},
    )
    for version, kinds in KINDS.items():
        resources = [
            {
                "name": plural,
                "kind": kind,
                "namespaced": not kind.startswith("Cluster"),
                "verbs": ["get", "list", "create"],
            }
            for kind, plural in kinds.items()
        ]
        listed = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version}
        yield _root(version), listed | {"resources": resources}


def _group(version: str) -> Document:
    named = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [named], "preferredVersion": named}


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _path(document: Document) -> str:
    version, where = document["apiVersion"], document["metadata"]
    plural = KINDS[version][document["kind"]]
    return f"{_root(version)}/namespaces/{where['namespace']}/{plural}/{where['name']}"


def _kubeconfig(url: str) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}],
        "current-context": "fake",
    }
