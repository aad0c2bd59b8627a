"""The real helm, built once by go at the version that helm_cli/go.mod pins, and what it renders."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit import needs
from tests.kit.cache import made_once
from tests.kit.places import ROOT

CHART = ROOT / "deploy" / "helm" / "gpufaas"
_PINNED = Path(__file__).with_name("helm_cli")
KUBERNETES = "1.31.0"
NAMESPACE = "openfaas"
RELEASE = "gpufaas"

# Two minutes on two idle cores; others may use them too.
BUILD_S = 900.0
_PACKAGE = "helm.sh/helm/v3/cmd/helm"
# As helm's own releases do: without, it takes every cluster for one of version 1.20.
_VERSION = "-X helm.sh/helm/v3/pkg/chartutil.k8sVersion"
_LINKED = f"-s -w {_VERSION}Major=1 {_VERSION}Minor={KUBERNETES.split('.')[1]}"
_HELM_S = 60.0

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """What helm said."""

    code: int
    out: str
    errors: str


@dataclass(frozen=True, slots=True)
class Helm:
    """helm, with a folder of its own for what it keeps."""

    path: Path
    home: Path

    def run(self, *words: str, kubeconfig: Path | None = None) -> Done:
        """Run it to its end. It must find no cluster but the one that is named."""
        environment = {
            "HOME": str(self.home),
            "PATH": os.defpath,
            "KUBECONFIG": str(kubeconfig or ""),
        }
        done = subprocess.run(
            [self.path, *words],
            capture_output=True,
            text=True,
            timeout=_HELM_S,
            env=environment,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def template(
        self, values: Path | None = None, *sets: str, kubernetes: str = KUBERNETES
    ) -> "Rendered":
        """What an install would make; the test fails where it cannot be rendered."""
        done = self.run(*_template(values, sets, kubernetes))
        assert done.code == 0, done.errors
        return Rendered.of(done.out)

    def refusal(self, *sets: str) -> str:
        """Why these values cannot be rendered."""
        done = self.run(*_template(None, sets, KUBERNETES))
        assert done.code != 0, "it was rendered"
        return done.errors


class Rendered:
    """The documents of one rendering."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents

    @classmethod
    def of(cls, text: str) -> "Rendered":
        """Reads what helm wrote."""
        return cls([document for document in yaml.safe_load_all(text) if document])

    def of_kind(self, *kinds: str) -> list[Document]:
        """Those of these kinds."""
        return [document for document in self.documents if document["kind"] in kinds]

    def one(self, kind: str, name: str) -> Document:
        """The one of this kind and name."""
        found = [each for each in self.of_kind(kind) if each["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} of {kind} {name}"
        return found[0]

    def pods(self) -> Iterator["Pod"]:
        """Every kind of pod that would run."""
        for document in self.of_kind("StatefulSet", "DaemonSet", "Deployment"):
            template = document["spec"]["template"]
            yield Pod(document, template["metadata"], template["spec"])
        for document in self.of_kind("Pod"):
            yield Pod(document, document["metadata"], document["spec"])

    def pod(self, component: str) -> "Pod":
        """That of one part."""
        return next(pod for pod in self.pods() if pod.component == component)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that a document makes."""

    owner: Document
    metadata: Document
    spec: Document

    @property
    def component(self) -> str:
        """Which part of ours it is."""
        name: str = self.metadata["labels"]["app.kubernetes.io/component"]
        return name

    @property
    def container(self) -> Document:
        """Its only one."""
        (found,) = self.spec["containers"]
        container: Document = found
        return container

    @property
    def ports(self) -> dict[str, int]:
        """By name."""
        listed = self.container.get("ports", ())
        return {port["name"]: port["containerPort"] for port in listed}

    def arguments(self, **variables: str) -> list[str]:
        """As the container gets them."""
        words = self.container["args"]
        for name, value in variables.items():
            words = [word.replace(f"$({name})", value) for word in words]
        assert not [word for word in words if "$(" in word], words
        return list(words)

    def file(self, path: str) -> tuple[str, str, str] | None:
        """The kind and name of what is mounted there, and its key; None where nothing is."""
        volumes = {each["name"]: each for each in self.spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            keys = dict(_keys(volumes.get(mount["name"], {})))
            folder, _, name = path.rpartition("/")
            if folder == mount["mountPath"] and name in keys:
                return keys[name]
        return None


def _keys(volume: Document) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """The files of a volume, each with the kind and name of what it is from, and its key there."""
    for source in volume.get("projected", {}).get("sources", [volume]):
        for kind, name_field in (("secret", "secretName"), ("configMap", "name")):
            if kind in source:
                one = source[kind]
                name = one.get(name_field) or one["name"]
                for item in one.get("items", ()):
                    yield item["path"], (kind, name, item["key"])


def labels_match(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """As Kubernetes has it, for selectors of labels alone."""
    assert set(selector) <= {"matchLabels"}, selector
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def helm_path() -> Path:
    """helm, which is made where it lacks; a test is skipped where it cannot be."""
    pinned = b"".join((_PINNED / name).read_bytes() for name in ("go.mod", "go.sum"))
    return made_once("helm", pinned + _LINKED.encode(), _build)


def _build(made: Path) -> None:
    go = str(needs.command("go", "golang"))
    options = ("-mod=readonly", "-trimpath", f"-ldflags={_LINKED}", "-o", str(made))
    done = subprocess.run(
        [go, "build", *options, _PACKAGE],
        cwd=_PINNED,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"go cannot build helm: {done.stderr[-2000:]}")


def _template(values: Path | None, sets: Sequence[str], kubernetes: str) -> list[str]:
    words = ["template", RELEASE, str(CHART), "--namespace", NAMESPACE]
    words += ["--kube-version", kubernetes]
    words += ["--values", str(values)] if values else []
    for pair in sets:
        words += ["--set", pair]
    return words
