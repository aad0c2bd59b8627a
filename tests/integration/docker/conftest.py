"""Tests of this folder run where containers of a Docker Engine of their own can be reached."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.docker.world import Images
from tests.kit.engines.docker_base_image import base_image
from tests.kit.engines.docker_engine import Engine, engine

pytestmark = pytest.mark.group("docker", seconds=70)  # of all modules here

# Without what the first one waits for: the base image, should it have to be made.
_ONE_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(_ONE_S, func_only=True))
            item.add_marker(pytest.mark.docker)


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Engine]:
    """Not the worker's: a stack of ours that is up there has a network and labels of one name."""
    with engine() as found:
        base_image(found)
        yield found


@pytest.fixture(scope="session")
def images(docker_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(docker_engine, tmp_path_factory.mktemp("images"))


@pytest.fixture(autouse=True)
def _inside(docker_engine: Engine) -> Iterator[None]:
    with docker_engine.inside():
        yield
    left = docker_engine.containers("label=com.gpufaas.gateway")
    if left:
        docker_engine.docker("rm", "--force", "--volumes", *left)
    assert not left, "a test leaves no containers"
