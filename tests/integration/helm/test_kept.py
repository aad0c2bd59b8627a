"""What is made once is kept over upgrades, as helm finds it in a cluster; and the notes."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.helm.chart_values import VALUES
from tests.integration.helm.fake_api import cluster
from tests.kit.engines.kubernetes.helm import (
    BUILD_S,
    CHART,
    NAMESPACE,
    RELEASE,
    Document,
    Helm,
    Rendered,
)

pytestmark = pytest.mark.timeout(BUILD_S + 60)

IN_NAMESPACE = ("--namespace", NAMESPACE)
NATS = ("--set", "queue.kind=nats", "--set", "openfaas.basicAuthSecret=")


def upgraded(
    helm: Helm, there: Sequence[Document], folder: Path, *words: str
) -> tuple[Rendered, str]:
    """What an upgrade of a release would make that made these documents, and its complaint."""
    with cluster(there, folder) as kubeconfig:
        done = helm.run(
            *("template", RELEASE, str(CHART), "--dry-run=server", "--is-upgrade"),
            *(*IN_NAMESPACE, "--kube-version", "1.31.0", *words),
            kubeconfig=kubeconfig,
        )
    return Rendered.of(done.out), done.errors


def secrets(rendered: Rendered) -> dict[str, Document]:
    return {
        each["metadata"]["name"]: each.get("data", {}) | each.get("stringData", {})
        for each in rendered.of_kind("Secret")
    }


def test_secrets_are_kept_when_the_release_is_upgraded(helm: Helm, tmp_path: Path) -> None:
    first, _ = upgraded(helm, [], tmp_path, *NATS)
    again, said = upgraded(helm, first.documents, tmp_path, *NATS)

    assert set(secrets(first)) == {
        *(
            f"{RELEASE}-{name}"
            for name in ("cluster", "login", "node", "etcd", "nats", "nats-config")
        )
    }
    assert secrets(again) == secrets(first), said
    assert [pod.metadata for pod in again.pods()] == [pod.metadata for pod in first.pods()]


def test_secrets_are_others_in_every_new_cluster(helm: Helm, tmp_path: Path) -> None:
    first, _ = upgraded(helm, [], tmp_path, *NATS)
    other, _ = upgraded(helm, [], tmp_path, *NATS)

    for name, data in secrets(first).items():
        for key, value in data.items():
            if key != "basic-auth-user":
                assert value != secrets(other)[name][key], (name, key)


def test_etcd_is_not_resized_when_it_is_there(helm: Helm, tmp_path: Path) -> None:
    first, _ = upgraded(helm, [], tmp_path)

    resized, said = upgraded(helm, first.documents, tmp_path, "--set", "etcd.replicas=3")

    assert not resized.documents
    assert "etcd.replicas is 1 in the cluster and cannot be changed" in said


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_notes_name_what_is_there(
    helm: Helm, rendered_with: Callable[[Path], Rendered], tmp_path: Path, values: Path
) -> None:
    with cluster([], tmp_path) as kubeconfig:
        done = helm.run(
            *("install", RELEASE, str(CHART), "--dry-run=client", "--disable-openapi-validation"),
            *(*IN_NAMESPACE, "--values", str(values)),
            kubeconfig=kubeconfig,
        )

    assert done.code == 0, done.errors
    notes = done.out.partition("NOTES:")[2]
    found = rendered_with(values)
    kinds = {"statefulset": "StatefulSet", "service": "Service", "secret": "Secret"}
    named = re.findall(r"(statefulset|service|secret)[ /]([a-z][a-z-]+)", notes)
    assert len(named) >= 3
    for kind, name in named:
        if name not in {"basic-auth", "gateway"}:  # OpenFaaS's own
            assert found.one(kinds[kind], name)
    is_behind = 'role = "provider"' in str(found.of_kind("ConfigMap"))
    assert ("functions_provider_url=http://" in notes) == is_behind
    assert ("No network policies" in notes) == (not found.of_kind("NetworkPolicy"))
