"""The chart as it is packaged: complete, and with what it shares with the rest of deploy/."""

import json
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.integration.helm.chart_values import FOLDER
from tests.kit.engines.kubernetes.helm import (
    BUILD_S,
    CHART,
    KUBERNETES,
    RELEASE,
    Document,
    Helm,
    Rendered,
)

pytestmark = pytest.mark.timeout(BUILD_S + 60)

DEPLOY = CHART.parents[1]
# What Kubernetes takes of one ConfigMap, in all.
MOST_BYTES = 1 << 20


@pytest.fixture(scope="module")
def package(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    done = helm.run("package", str(CHART), "--destination", str(folder))
    assert done.code == 0, done.errors
    (made,) = folder.iterdir()
    return made


def everything(helm: Helm, chart: Path) -> Rendered:
    values = FOLDER / "everything.yaml"
    done = helm.run(
        *("template", RELEASE, str(chart), "--kube-version", KUBERNETES, "--values", str(values))
    )
    assert done.code == 0, done.errors
    return Rendered.of(done.out)


def test_package_has_copies_of_what_is_linked(package: Path) -> None:
    with tarfile.open(package) as archive:
        names = {entry.name for entry in archive if entry.isfile()}
        links = [entry.name for entry in archive if entry.issym() or entry.islnk()]
    linked = [*_shared("prometheus/rules", "*.yml"), *_shared("grafana/dashboards", "*.json")]

    assert not links
    assert linked
    assert {f"gpufaas/files/{each.relative_to(DEPLOY)}" for each in linked} <= names
    assert {
        "gpufaas/README.md",
        "gpufaas/values.schema.json",
        "gpufaas/templates/NOTES.txt",
    } <= names


def _shared(folder: str, names: str) -> list[Path]:
    found = sorted((DEPLOY / folder).glob(names))
    assert found, folder
    return found


def test_package_renders_what_the_folder_does(helm: Helm, package: Path) -> None:
    def kinds(rendered: Rendered) -> list[tuple[str, str]]:
        return [(each["kind"], each["metadata"]["name"]) for each in rendered.documents]

    assert kinds(everything(helm, package)) == kinds(everything(helm, CHART))


def test_rules_are_those_that_promtool_checks(helm: Helm, package: Path) -> None:
    (rules,) = everything(helm, package).of_kind("PrometheusRule")
    wanted: list[Document] = []
    for path in _shared("prometheus/rules", "*.yml"):
        wanted += yaml.safe_load(path.read_text())["groups"]

    def by_name(groups: list[Document]) -> dict[str, Document]:
        return {group["name"]: group for group in groups}

    assert by_name(rules["spec"]["groups"]) == by_name(wanted)


def test_dashboards_are_those_that_are_tested(helm: Helm, package: Path) -> None:
    found = everything(helm, package)
    for path in _shared("grafana/dashboards", "*.json"):
        made = found.one("ConfigMap", f"gpus-dashboard-{path.stem}")
        (text,) = made["data"].values()
        assert json.loads(text) == json.loads(path.read_text())
        assert len(json.dumps(made)) < MOST_BYTES
        assert made["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_every_value_is_in_the_schema_and_has_a_comment_near_it() -> None:
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())

    assert set(yaml.safe_load(text)) <= set(schema["properties"])
    for name in ("mode", "image", "policy", "openfaas", "gpuManager", "queue", "networkPolicy"):
        assert f"\n{name}:" in text
    assert sum(line.lstrip().startswith("#") for line in text.splitlines()) > 60
