"""One Kubernetes node for all of these tests, and on it our chart with functions of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.kubernetes.chart_stack import ChartStack
from tests.e2e.kubernetes.cluster_images import image_archive
from tests.kit import needs
from tests.kit.engines.docker_engine import Engine
from tests.kit.engines.faas_cli import NoFaasCli, faas_cli
from tests.kit.engines.kubernetes.helm import Helm, helm_path
from tests.kit.engines.kubernetes.kubernetes_node import KubernetesNode, kubernetes_node
from tests.kit.engines.kubernetes.node_programs import BUILD_S
from tests.kit.folder_fixtures import of_folder

pytestmark = pytest.mark.group("compose", seconds=560)  # of all modules here

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            # The first one may build the programs of a node.
            item.add_marker(pytest.mark.timeout(BUILD_S))


@pytest.fixture(scope="module")
def node(request: pytest.FixtureRequest) -> KubernetesNode:
    """It is ready for pods."""
    return of_folder(request, _HERE, kubernetes_node)


@pytest.fixture
def inside(node: KubernetesNode) -> Iterator[None]:
    """The test reaches pods and Services."""
    with node.inside():
        yield


@pytest.fixture(scope="module")
def chart(
    request: pytest.FixtureRequest,
    node: KubernetesNode,
    docker_engine: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> ChartStack:
    """Our images are on the node, and nothing is installed yet."""

    @contextmanager
    def made() -> Iterator[ChartStack]:
        try:
            program = faas_cli()
        except NoFaasCli as error:
            needs.lacking(str(error))
        helm = Helm(helm_path(), tmp_path_factory.mktemp("helm"))
        folder = tmp_path_factory.mktemp("chart")
        found = ChartStack(node, helm, program, folder)
        found.have_images(image_archive(docker_engine, program, folder))
        yield found

    return of_folder(request, _HERE, made)
