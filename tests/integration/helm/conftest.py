"""One helm for all of these tests, and what it renders under each file of values."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.integration.helm.chart_values import VALUES
from tests.kit.engines.kubernetes.helm import Helm, Rendered, helm_path


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Built by the first run."""
    return Helm(helm_path(), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def rendered_with(helm: Helm) -> Callable[[Path], Rendered]:
    """Renders once a file."""
    return cache(helm.template)


@pytest.fixture(params=VALUES, ids=lambda path: path.stem)
def rendered(request: pytest.FixtureRequest, rendered_with: Callable[[Path], Rendered]) -> Rendered:
    """Under each file of values, one after another."""
    return rendered_with(request.param)
